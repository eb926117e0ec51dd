"""Which processors each of several engines has, from cores as a system describes them, and in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.device.engine_cores import EngineCores, divided
from fastdeploy_sd.device.processors import Core, Processors, describe_numbers, read_cores, read_numbers
from tests.unit.device.test_processors import read, siblings


def cores_of(*nodes: tuple[int | None, int]) -> list[Core]:
    """Cores of two processors each: (node, how many cores)."""
    owners = [node for node, count in nodes for _ in range(count)]
    return [Core((2 * i, 2 * i + 1), node) for i, node in enumerate(owners)]


_nodes = st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=4)


@given(_nodes, st.integers(1, 64), st.randoms())
def test_no_core_is_cut_or_in_two_parts_and_parts_are_equal(
    nodes: list[tuple[int | None, int]], count: int, random: object
) -> None:
    cores = cores_of(*nodes)
    random.shuffle(cores)  # type: ignore[attr-defined]
    parts = divided(cores, count)
    assert len(parts) == count
    assert all(part.cores for part in parts)
    given_out = [core for part in parts for core in part.cores]
    sizes = {len(part.cores) for part in parts}
    if len(cores) < count:
        assert all(part.is_shared for part in parts)
        assert sizes == {1}
        assert set(given_out) == set(cores), "no core is idle"
    else:
        assert not any(part.is_shared for part in parts)
        assert max(sizes) - min(sizes) <= 1
        assert sorted(given_out, key=lambda core: core.processors) == sorted(cores, key=lambda core: core.processors)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_parts_that_can_lie_on_one_node_do(num_nodes: int, engines_per_node: int, cores_each: int) -> None:
    cores = cores_of(*((node, engines_per_node * cores_each) for node in range(num_nodes)))
    parts = divided(cores, num_nodes * engines_per_node)
    assert [part.nodes for part in parts] == [[node] for node in range(num_nodes) for _ in range(engines_per_node)]


def test_hyperthreads_and_nodes_of_a_system_stay_together(tmp_path: Path) -> None:
    """As Linux numbers two sockets of four cores: second threads after all first ones."""
    files = siblings(*(f"{cpu},{cpu + 8}" for cpu in range(8)))
    files |= {"sys/devices/system/node/node0/cpulist": "0-3,8-11", "sys/devices/system/node/node1/cpulist": "4-7,12-15"}
    read(tmp_path, files, set(range(16)))
    four = divided(read_cores(tmp_path, range(16)), 4)
    assert [part.describe() for part in four] == [
        "processors 0-1,8-9, 2 cores of memory node 0",
        "processors 2-3,10-11, 2 cores of memory node 0",
        "processors 4-5,12-13, 2 cores of memory node 1",
        "processors 6-7,14-15, 2 cores of memory node 1",
    ]
    assert divided(read_cores(tmp_path, range(16)), 3)[1].describe().endswith("3 cores of memory nodes 0-1")
    assert divided(read_cores(tmp_path, {3, 11, 4}), 2)[1].describe() == "processors 4, 1 core of memory node 1"
    assert [part.describe() for part in divided(read_cores(tmp_path, {3, 11}), 2)] == [
        "processors 3,11, 1 core of memory node 0, shared with other engines: there are fewer cores than engines"
    ] * 2


@given(st.sets(st.integers(0, 300), min_size=1))
def test_numbers_are_written_as_they_are_read(numbers: set[int]) -> None:
    assert read_numbers(describe_numbers(numbers)) == numbers


def test_a_quota_is_divided_too() -> None:
    found = Processors(tuple(range(16)), 16, 6.0, ())
    assert [found.with_quota_among(count).num_threads for count in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert Processors((0,), 1, None, ()).with_quota_among(2).quota is None


_CHILD = """
import json, os, subprocess, sys, threading
from fastdeploy_sd.device import library
from fastdeploy_sd.device.engine_cores import take_share
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
take_share(int(sys.argv[1]), int(sys.argv[2]))
of_threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
inherited = subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"])
print(json.dumps([of_threads, json.loads(inherited), library.num_threads()]))
"""


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_its_threads_and_its_children_keep_to_their_part(number: int) -> None:
    expected: EngineCores = divided(read_cores(Path("/"), os.sched_getaffinity(0)), 2)[number]
    output = subprocess.check_output([sys.executable, "-c", _CHILD, str(number), "2"])
    of_threads, inherited, num_threads = json.loads(output)
    assert len(of_threads) > 1
    assert all(allowed == sorted(expected.processors) for allowed in of_threads)
    assert inherited == sorted(expected.processors)
    assert 1 <= num_threads <= len(expected.cores)
