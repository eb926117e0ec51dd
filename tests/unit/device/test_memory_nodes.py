"""Which memory nodes memory is spread over, from made-up machines, and that the system does it, on one node too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.device import library, memory_nodes
from fastdeploy_sd.device.memory import huge_pages
from fastdeploy_sd.device.memory_nodes import interleave, nodes_to_spread, own_nodes, policy, spread, spreading_files
from fastdeploy_sd.device.processors import Processors, own_processors
from fastdeploy_sd.device.tensors import aligned_zeros
from fastdeploy_sd.models.weights.packed_file import PackedFile, write_packed_file
from fastdeploy_sd.worker.kv.kv_file import KvFile, create_kv_file

DEFAULT, BIND, INTERLEAVE = 0, 2, 3
TWO_NODES = Processors((0, 1, 8, 9), 4, None, (0, 2))


def write_files(root: Path, has_memory: str, allowed: str) -> None:
    for name, text in (
        ("sys/devices/system/node/has_memory", f"{has_memory}\n"),
        ("proc/self/status", f"Name:\tpython\nMems_allowed:\t0000000f\nMems_allowed_list:\t{allowed}\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_nodes_that_threads_run_on_and_that_have_memory(tmp_path: Path) -> None:
    assert nodes_to_spread(tmp_path, TWO_NODES, 4, DEFAULT) == [0, 2]  # nothing is known of memory
    write_files(tmp_path, "0-3", "0-2")
    assert nodes_to_spread(tmp_path, TWO_NODES, 4, DEFAULT) == [0, 2]
    write_files(tmp_path, "0-1", "0-3")
    assert nodes_to_spread(tmp_path, TWO_NODES, 4, DEFAULT) == ()
    write_files(tmp_path, "0-3", "2")
    assert nodes_to_spread(tmp_path, TWO_NODES, 4, DEFAULT) == ()


def test_one_thread_one_node_and_an_operators_policy_are_left_alone(tmp_path: Path) -> None:
    write_files(tmp_path, "0-3", "0-3")
    assert nodes_to_spread(tmp_path, TWO_NODES, 1, DEFAULT) == ()
    assert nodes_to_spread(tmp_path, TWO_NODES, 4, BIND) == ()
    assert nodes_to_spread(tmp_path, TWO_NODES, 4, -1) == ()
    assert nodes_to_spread(tmp_path, Processors((0, 1), 2, None, (0,)), 2, DEFAULT) == ()


def test_of_this_process() -> None:
    assert set(own_nodes()) <= set(own_processors().nodes)


@pytest.fixture
def node() -> int:
    """A node that this process may have memory of; the system is asked as it will be."""
    first = min(own_processors().nodes, default=0)
    try:
        interleave(huge_pages(1 << 21), [first])
    except OSError as error:
        pytest.skip(f"this system sets no policies: {error}")
    return first


@pytest.fixture
def over_one_node(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is spread, over one node: as on a machine with several, as far as the system's calls go."""
    monkeypatch.setattr(memory_nodes, "own_nodes", lambda: (node,))


@pytest.mark.usefixtures("over_one_node")
def test_large_memory_is_spread_and_works() -> None:
    arrays: list[np.ndarray] = [aligned_zeros((3 << 20,), np.uint8)]
    fd = create_kv_file()
    arrays.append(KvFile(fd, 1 << 20).zeros((1 << 20,), np.uint8))
    os.close(fd)
    for array in arrays:
        assert policy(array) == INTERLEAVE
        assert not array.any()
        array[:] = 7
        assert array.sum() == 7 * array.size
    assert policy(aligned_zeros((100,), np.float32).view(np.uint8)) == DEFAULT
    assert policy() == DEFAULT


@pytest.mark.usefixtures("over_one_node")
def test_packed_weights_are_written_to_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread whose policy is its own again afterwards."""
    modes = []
    fchmod = os.fchmod

    def seen(fd: int, mode: int) -> None:
        modes.append(policy())
        fchmod(fd, mode)

    monkeypatch.setattr(os, "fchmod", seen)
    matrix: np.ndarray = np.arange(5000, dtype=np.uint8)
    write_packed_file(tmp_path / "w", {"a": 1}, {"m": matrix}, 0o600)
    assert modes == [INTERLEAVE]
    assert policy() == DEFAULT
    np.testing.assert_array_equal(PackedFile(tmp_path / "w", {"a": 1}).matrices["m"], matrix)


@pytest.fixture
def _told_again() -> Iterator[None]:
    memory_nodes._say_refused.cache_clear()
    yield
    memory_nodes._say_refused.cache_clear()


@pytest.mark.usefixtures("_told_again")
def test_a_system_that_does_not_tell_the_policy_is_told_of_where_there_are_several_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose filter refuses get_mempolicy."""
    monkeypatch.setattr(memory_nodes, "policy", lambda: -1)
    monkeypatch.setattr(memory_nodes, "_text", lambda path: "")
    monkeypatch.setattr(library, "num_threads", lambda: 4)
    one_node = Processors((0, 1), 2, None, (0,))
    for processors, num_records in ((one_node, 0), (TWO_NODES, 1), (TWO_NODES, 1)):
        monkeypatch.setattr(memory_nodes, "own_processors", lambda found=processors: found)
        assert own_nodes() == ()
        assert len(caplog.records) == num_records
    assert "refuses get_mempolicy" in caplog.text


@pytest.mark.usefixtures("_told_again", "node")
def test_a_refusal_is_told_once_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_nodes, "own_nodes", lambda: (1000,))
    for _ in range(2):
        memory = spread(huge_pages(1 << 21))
        with spreading_files():
            assert policy() == DEFAULT
        assert policy(memory) == DEFAULT
        memory[:] = 1
    [record] = caplog.records
    assert record.getMessage() == "memory is not spread over memory nodes: [Errno 22] memory policy: Invalid argument"
