"""Packed weights that are kept: the same bytes and logits, or packed again with a warning that says why."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.llm import LLM
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.weights import packed_cache
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices, cache_key, file_name, packed_matrices
from fastdeploy_sd.models.weights.packed_file import write_packed_file
from fastdeploy_sd.sampling_params import SamplingParams
from tests.models.mtp_models import make_model
from tests.models.packed_weights import SCHEME, damage_byte, load, only_file, warnings_of
from tests.ops.backends import isa

pytestmark = pytest.mark.slow


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
        assert {name: set(data.tolist()) for name, data in store.items()} == {"a": {97}, "b": {98}}
        assert store.find("a", 71) is None


def fail_after_packing(store: PackedMatrices | None) -> None:
    assert store is not None
    store.add("a", np.zeros(3, np.uint8))
    raise KeyError


def test_a_file_that_somebody_deletes_at_once_is_no_reason_not_to_start(
    folder: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_delete(path: pathlib.Path, *arguments: Any) -> None:
        write_packed_file(path, *arguments)
        path.unlink()

    monkeypatch.setattr(packed_cache, "write_packed_file", write_and_delete)
    assert load(folder, model)[1]
    assert "the next start packs again" in warnings_of(caplog)[0]


def test_nothing_is_kept_of_a_load_that_failed(folder: pathlib.Path, model: pathlib.Path) -> None:
    with pytest.raises(KeyError), packed_matrices(folder, Checkpoint(model), SCHEME, "target") as store:
        fail_after_packing(store)
    assert not list(folder.glob("*.packed"))


def test_a_place_that_is_no_folder_is_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="packed_weights_cache: expected a folder or a place for one"):
        load(tmp_path / "file", model)


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
