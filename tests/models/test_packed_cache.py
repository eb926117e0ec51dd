"""Packed weights that are kept in a file: the same bytes and logits, or packed again with a warning that says why."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

import numpy as np
import pytest

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.llm import LLM
from fastdeploy_sd.models import packed_cache, packed_file
from fastdeploy_sd.models.packed_cache import PackedMatrices, cache_key, file_name, packed_matrices
from fastdeploy_sd.models.packed_file import PackedFile, PackedFileError, write_packed_file
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_packer import WeightPacker
from fastdeploy_sd.models.weights import DecoderWeights
from fastdeploy_sd.ops import library
from fastdeploy_sd.quantization.scheme import QuantScheme
from fastdeploy_sd.sampling_params import SamplingParams
from tests.models import golden
from tests.models.mtp_models import make_model
from tests.ops.backends import isa

SCHEME = QuantScheme.create("bfloat16", "wint4")
NAME = "qwen3_moe-tiny"
Loaded = tuple[dict[str, bytes], bool]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(golden.ROOT / NAME, tmp_path / "model"))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "deep" / "cache"


def load(folder: pathlib.Path | None, model: pathlib.Path, scheme: QuantScheme = SCHEME) -> Loaded:
    """Pack, or read, two matrices and one layer's experts; return the bytes, and whether anything was packed."""
    checkpoint = Checkpoint(model)
    with packed_matrices(folder, checkpoint, scheme, "target") as store:
        return packed_parts(checkpoint, scheme, store), store is None or store.has_new


def packed_parts(checkpoint: Checkpoint, scheme: QuantScheme, store: PackedMatrices | None) -> dict[str, bytes]:
    config = read_decoder_config(checkpoint.config)
    weights = DecoderWeights(checkpoint, config)
    assert config.moe is not None
    size, names = config.moe.intermediate_size, [f"mlp.experts.{e}" for e in range(config.moe.num_experts)]
    experts = [weights.down(1, name, size)[0] for name in names]
    packer = WeightPacker(checkpoint, store)
    packed = {
        "qkv": packer.linear(weights.qkv(0)[0], scheme.linear).data,
        "head": packer.linear(weights.lm_head(), scheme.lm_head).data,
        "experts": packer.experts(experts, scheme.linear).data,
    }
    return {name: data.numpy().tobytes() for name, data in packed.items()}


def only_file(folder: pathlib.Path) -> pathlib.Path:
    (path,) = folder.glob("*.packed")
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_kept_is_what_was_packed(folder: pathlib.Path, model: pathlib.Path) -> None:
    want, _ = load(None, model)
    assert load(folder, model) == (want, True)
    assert load(folder, model) == (want, False)


def test_levels_share_a_file(folder: pathlib.Path, model: pathlib.Path) -> None:
    want, _ = load(None, model)
    for i, level in enumerate(library.available_isas()):
        with isa(level):
            assert load(folder, model) == (want, i == 0)


def test_formats_and_checkpoints_have_files_of_their_own(folder: pathlib.Path, model: pathlib.Path) -> None:
    other = pathlib.Path(shutil.copytree(model, model.parent / "other" / "model"))
    for path in (model, other):
        for scheme in (SCHEME, QuantScheme.create("bfloat16", "wint8")):
            assert load(folder, path, scheme)[1]
            assert not load(folder, path, scheme)[1]
    assert len(list(folder.glob("*.packed"))) == 4


def damage_byte(path: pathlib.Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (0, "expected a file of packed weights"),
        (8, "expected version"),
        (12, "expected a header with its checksum"),
        (20, "expected a header with its checksum"),
        (40, "expected a header with its checksum"),
        (-1, "expected the checksums of its bytes"),
    ],
)
def test_a_damaged_byte_is_found(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, position: int, text: str
) -> None:
    want, _ = load(folder, model)
    path = only_file(folder)
    whole = path.read_bytes()
    damage_byte(path, position)
    assert load(folder, model) == (want, True)
    (warning,) = warnings_of(caplog)
    assert text in warning
    assert str(path) in warning
    assert path.read_bytes() == whole, "written anew"


def test_every_byte_that_counts_is_checked(tmp_path: pathlib.Path) -> None:
    """Only the padding between matrices may differ."""
    path = tmp_path / "f"
    matrices = {"a": np.arange(200, dtype=np.uint8), "b": np.arange(5, dtype=np.uint8)}
    write_packed_file(path, {"k": 1}, matrices, 0o600)
    size, begins = path.stat().st_size, [data.ctypes.data for data in PackedFile(path, {"k": 1}).matrices.values()]
    distance = begins[1] - begins[0]
    counted = [*range(300), size - 5, size - 1, *range(size - 5 - distance, size - 5 - distance + 200)]
    whole = path.read_bytes()
    header_end = 28 + int.from_bytes(whole[12:20], "little")
    for position in {p for p in counted if p < header_end or p >= size - 5 - distance}:
        damage_byte(path, position)
        with pytest.raises(PackedFileError):
            PackedFile(path, {"k": 1})
        path.write_bytes(whole)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_packed_again(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, keep: float
) -> None:
    want, _ = load(folder, model)
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert load(folder, model) == (want, True)
    assert len(warnings_of(caplog)) == 1
    assert not load(folder, model)[1]


def test_another_version_of_the_library_packs_again(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder, model)
    monkeypatch.setattr("fastdeploy_sd.__version__", "0.0.0")
    assert load(folder, model)[1]
    assert "expected the key" in warnings_of(caplog)[0]
    assert not load(folder, model)[1]
    only_file(folder)


def retrain(weights: pathlib.Path) -> None:
    """Change every tensor's bytes and keep the header, the size and the time."""
    data, time_ns = bytearray(weights.read_bytes()), weights.stat().st_mtime_ns
    header_end = 8 + int.from_bytes(data[:8], "little")
    data[header_end:] = bytes(byte ^ 1 for byte in data[header_end:])
    weights.write_bytes(data)
    os.utime(weights, ns=(time_ns, time_ns))


@pytest.mark.parametrize("what", ["bytes", "size", "time", "training", "config"])
def test_a_changed_checkpoint_packs_again(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    load(folder, model)
    weights = model / "model.safetensors"
    if what == "bytes":
        damage_byte(weights, -1)
    elif what == "size":
        weights.write_bytes(weights.read_bytes() + b"\0")
    elif what == "training":
        retrain(weights)
    elif what == "time":
        os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    else:
        config = json.loads((model / "config.json").read_text()) | {"rope_theta": 5.0}
        (model / "config.json").write_text(json.dumps(config))
    want, _ = load(None, model)
    assert load(folder, model) == (want, True)
    assert len(warnings_of(caplog)) == 1
    only_file(folder)


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(model)
    with packed_matrices(folder, checkpoint, SCHEME, "target") as store:
        assert store is not None
        store.add("a", np.zeros(3, np.uint8))
        os.utime(model / "model.safetensors")
    assert "the checkpoint changed" in warnings_of(caplog)[0]
    assert not list(folder.glob("*.packed"))


def test_what_a_file_lacks_is_added(folder: pathlib.Path, model: pathlib.Path) -> None:
    checkpoint = Checkpoint(model)
    for name in ("a", "b"):
        with packed_matrices(folder, checkpoint, SCHEME, "draft") as store:
            assert store is not None
            store.add(name, np.full(70, ord(name), np.uint8))
    with packed_matrices(folder, checkpoint, SCHEME, "draft") as store:
        assert store is not None
        assert {name: set(data.tolist()) for name, data in store.matrices.items()} == {"a": {97}, "b": {98}}
        assert store.find("a", 71) is None


def replace_under_lock(source: str, target: pathlib.Path) -> None:
    """Fail where the lock is free while a file gets its name."""
    with open(target.with_suffix(".lock"), "a", encoding="utf-8") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(source, target)


def test_every_write_holds_the_lock(folder: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file.os, "replace", replace_under_lock)
    for name in ("a", "b"):
        with packed_matrices(folder, Checkpoint(model), SCHEME, "draft") as store:
            assert store is not None
            store.add(name, np.zeros(70, np.uint8))
    assert only_file(folder).stat().st_size > 0


def test_what_a_killed_process_left_is_removed(folder: pathlib.Path, model: pathlib.Path) -> None:
    load(folder, model)
    path = only_file(folder)
    path.unlink()
    left, another = folder / f".{path.name}.abcd1234", folder / ".other.packed.abcd1234"
    left.touch()
    another.touch()
    load(folder, model)
    assert path.exists()
    assert not left.exists()
    assert another.exists(), "somebody else may be writing it"


def fail_after_packing(store: PackedMatrices | None) -> None:
    assert store is not None
    store.add("a", np.zeros(3, np.uint8))
    raise KeyError


def test_nothing_is_kept_of_a_load_that_failed(folder: pathlib.Path, model: pathlib.Path) -> None:
    with pytest.raises(KeyError), packed_matrices(folder, Checkpoint(model), SCHEME, "target") as store:
        fail_after_packing(store)
    assert not list(folder.glob("*.packed"))


def test_the_file_is_no_more_readable_than_the_checkpoint(folder: pathlib.Path, model: pathlib.Path) -> None:
    (model / "model.safetensors").chmod(0o640)
    before = os.umask(0o022)
    try:
        load(folder, model)
    finally:
        os.umask(before)
    assert only_file(folder).stat().st_mode & 0o777 == 0o640


def test_a_place_that_is_no_folder_is_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="packed_weights_cache: expected a folder or a place for one"):
        load(tmp_path / "file", model)


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed_file.os, "fsync", fail)
        yield


def test_a_full_disk_costs_the_file_only(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, _ = load(None, model)
    with full_disk(monkeypatch):
        assert load(folder, model) == (want, True)
    assert "No space left on device" in warnings_of(caplog)[0]
    assert [path.suffix for path in folder.iterdir()] == [".lock"], "nothing half written is left"


def test_a_folder_without_a_place_for_the_lock_is_still_read(folder: pathlib.Path, model: pathlib.Path) -> None:
    """As a folder on a read-only file system: root may write everywhere, so the lock's name is taken by a folder."""
    want, _ = load(folder, model)
    lock = only_file(folder).with_suffix(".lock")
    lock.unlink()
    lock.mkdir()
    assert load(folder, model) == (want, False)
    only_file(folder).unlink()
    assert load(folder, model) == (want, True)


def flock_failing(code: int, failing: int) -> Callable[[object, int], None]:
    """Return a flock that fails with an error number where all flags of `failing` are given."""

    def flock(file: object, operation: int) -> None:
        if operation & failing == failing:
            raise OSError(code, os.strerror(code))

    return flock


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_used_without(
    folder: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(packed_cache.fcntl, "flock", flock_failing(code, fcntl.LOCK_EX))
    want, _ = load(None, model)
    assert load(folder, model) == (want, True)
    path = only_file(folder)
    path.unlink()
    written_by_another = folder / f".{path.name}.abcd1234"
    written_by_another.touch()
    assert load(folder, model) == (want, True)
    assert load(folder, model) == (want, False)
    assert written_by_another.exists()


def test_who_waits_says_so(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(packed_cache.fcntl, "flock", flock_failing(errno.EWOULDBLOCK, fcntl.LOCK_NB))
    assert load(folder, model)[1]
    assert "waiting for the process that packs the same weights" in caplog.text


def load_in_a_process(folder: str, model: str, started: Event, results: SimpleQueue[Loaded]) -> None:
    started.set()
    results.put(load(pathlib.Path(folder), pathlib.Path(model)))


def test_a_process_waits_for_the_one_that_packs(folder: pathlib.Path, model: pathlib.Path) -> None:
    checkpoint, context = Checkpoint(model), multiprocessing.get_context("spawn")
    started, results = context.Event(), context.SimpleQueue()
    arguments = (str(folder), str(model), started, results)
    processes = [context.Process(target=load_in_a_process, args=arguments, daemon=True) for _ in range(2)]
    with packed_matrices(folder, checkpoint, SCHEME, "target") as store:
        for process in processes:
            process.start()
        started.wait()
        processes[0].join(1.0)  # long enough to pack, if it did not wait
        assert results.empty()
        want = packed_parts(checkpoint, SCHEME, store)
    assert [results.get() for _ in processes] == [(want, False)] * 2
    for process in processes:
        process.join()


def test_the_name_stays_and_the_key_does_not(model: pathlib.Path) -> None:
    before = Checkpoint(model)
    os.utime(model / "model.safetensors")
    after = Checkpoint(model)
    assert file_name(before, SCHEME, "target") == file_name(after, SCHEME, "target")
    assert file_name(before, SCHEME, "target") != file_name(before, SCHEME, "draft")
    assert cache_key(before, SCHEME, "target") != cache_key(after, SCHEME, "target")


def test_an_empty_store_finds_nothing() -> None:
    assert PackedMatrices(None).find("a", 1) is None


def generated(model: pathlib.Path, folder: pathlib.Path | None) -> list[tuple[int, ...]]:
    """Return what a whole engine generates, drafting with the MTP layer of a checkpoint of its own."""
    options = {"packed_weights_cache": None if folder is None else str(folder), "quantization": "wint4"}
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    with LLM(model=str(model), num_gpu_blocks_override=64, speculative_config=speculative, **options) as llm:
        prompts = [list(range(5, 5 + n)) for n in (3, 40)]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_a_model_from_the_file_generates_the_same(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    model = make_model(tmp_path, "ernie4_5-tiny", "ernie-folder").path
    want = generated(model, None)
    assert generated(model, folder) == want
    times = [path.stat().st_mtime_ns for path in sorted(folder.glob("*.packed"))]
    assert generated(model, folder) == want
    assert len(times) == 2, "the target's and the draft layers'"
    assert times == [path.stat().st_mtime_ns for path in sorted(folder.glob("*.packed"))], "nothing was packed again"
