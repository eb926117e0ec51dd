"""Packed weights in memory that several processes map: one packs, the others wait, and nothing else is ever found."""

from __future__ import annotations

import os
import pathlib
import resource
import threading
from collections.abc import Iterator

import pytest

from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.distributed.starting import new_weights_file
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.weights.packed_cache import packed_matrices
from fastdeploy_sd.models.weights.packed_file import PackedFileError
from fastdeploy_sd.models.weights.shared_weights import SharedPart, SharedWeights, create_weights_file
from tests.models.packed_weights import SCHEME, Loaded, damage_byte, load, packed_parts, warnings_of

pytestmark = pytest.mark.slow

KEY = {"a": 1}


@pytest.fixture
def shared() -> Iterator[SharedWeights]:
    """Memory of processes on the first node."""
    file = create_weights_file()
    yield SharedWeights(pathlib.Path(f"/proc/self/fd/{file}"), 0)
    os.close(file)


def load_shared(shared: SharedWeights, model: pathlib.Path, folder: pathlib.Path | None = None) -> Loaded:
    """As `load`."""
    checkpoint = Checkpoint(model)
    with packed_matrices(folder, checkpoint, SCHEME, "target", shared=shared) as store:
        assert store is not None
        return packed_parts(checkpoint, SCHEME, store), store.has_new


def test_what_others_find_is_what_was_packed(shared: SharedWeights, model: pathlib.Path) -> None:
    want, _ = load(None, model)
    assert load_shared(shared, model) == (want, True)
    assert load_shared(shared, model) == (want, False)
    assert load_shared(SharedWeights(shared.path, 1), model) == (want, True), "another node has its own copy"


def test_the_first_reads_a_folder_and_the_others_do_not(
    shared: SharedWeights, model: pathlib.Path, folder: pathlib.Path
) -> None:
    assert load_shared(shared, model, folder)[1]
    want, is_new = load(folder, model)
    assert not is_new, "what was packed into memory is in the folder too"
    assert load_shared(SharedWeights(shared.path, 1), model, folder) == (want, False)
    (folder / "moved").mkdir()
    for path in folder.glob("*.packed"):
        path.rename(folder / "moved" / path.name)
    assert load_shared(SharedWeights(shared.path, 1), model, folder) == (want, False)
    assert not list(folder.glob("*.packed"))


def test_pages_are_the_same_memory(shared: SharedWeights) -> None:
    """Zeros in whole pages, whatever their sizes, which one writes and others see; no one can write what is found."""
    sizes = [5, 4096, (2 << 20) + 1, (65 << 20) + 1, 7]
    first = SharedPart(shared, "part", KEY)
    data = [first.take(size) for size in sizes]
    assert all(not each.any() and each.ctypes.data % 4096 == 0 for each in data)
    first.write({str(size): each for size, each in zip(sizes, data, strict=True)})
    found = SharedPart(shared, "part", KEY).found
    assert found is not None
    assert [each.nbytes for each in found.matrices.values()] == sizes
    for value, each, other in zip((1, 2, 3, 4, 5), data, found.matrices.values(), strict=True):
        each[:] = value
        assert (other == value).all()


def test_who_comes_second_waits_and_one_that_ends_while_it_packs_leaves_nothing(shared: SharedWeights) -> None:
    parts: list[SharedPart] = []

    def open_part() -> None:
        parts.append(SharedPart(shared, "part", KEY))

    first = SharedPart(shared, "part", KEY)
    SharedPart(shared, "other part", KEY).close()
    lost = first.take(3 << 20)
    lost[:] = 1
    second = threading.Thread(target=open_part)
    second.start()
    second.join(0.2)
    assert not parts
    first.close()
    second.join()
    assert parts[0].found is None
    assert not parts[0].take(3 << 20).any()


def test_one_that_is_started_again_over_another_checkpoint_has_weights_of_its_own(
    shared: SharedWeights, model: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_shared(shared, model)
    found = SharedPart(shared, "part", KEY)
    found.write({"m": found.take(3)})
    with pytest.raises(PackedFileError, match="expected the key"):
        SharedPart(shared, "part", {"a": 2})
    damage_byte(model / "model.safetensors", -1)
    with packed_matrices(None, Checkpoint(model), SCHEME, "target", shared=shared) as store:
        assert store is None
    assert "this engine has weights of its own" in warnings_of(caplog)[0]


def test_without_the_memory_each_has_its_own(model: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = SharedWeights(pathlib.Path("/proc/self/fd/no"), 0)
    with packed_matrices(None, Checkpoint(model), SCHEME, "target", shared=nothing) as store:
        assert store is None
    assert "this engine has weights of its own" in warnings_of(caplog)[0]


def test_a_system_that_gives_no_such_memory_is_served_without(caplog: pytest.LogCaptureFixture) -> None:
    config, limits = config_from_kwargs(model="demo"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[1]))
    try:
        with new_weights_file(config, 2) as path:
            assert path is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "each engine has weights of its own" in warnings_of(caplog)[0]
    with new_weights_file(config, 1) as path:
        assert path is None
