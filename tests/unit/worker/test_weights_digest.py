"""The digest of the weights: it covers every byte, wherever the files lie, and is computed once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.distributed.node_identity import describe, mismatch
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.worker.loading import weights_digest as w


@pytest.fixture
def model(tmp_path: Path, golden_dir: Path) -> Path:
    return Path(shutil.copytree(golden_dir / "qwen2-tiny", tmp_path / "model"))


def change(model: Path, position: int, num_bytes: int = 1) -> None:
    """Flip bits and keep size and time."""
    [weights] = model.glob("*.safetensors")
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(position)
        found = file.read(num_bytes)
        file.seek(position)
        file.write(bytes(byte ^ 1 for byte in found))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_every_byte_counts_and_no_place_or_time_does(model: Path, tmp_path: Path) -> None:
    [weights] = model.glob("*.safetensors")
    size = weights.stat().st_size
    header_end = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    digests = {w.compute(Checkpoint(model))}
    positions = range(header_end, size, (size - header_end) // 40)
    for position in (*positions, size - 1):
        change(model, position)
        digests.add(w.compute(Checkpoint(model)))
        change(model, position)
    assert len(digests) == len(positions) + 2
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    os.utime(copy / weights.name, ns=(0, 0))
    assert w.compute(Checkpoint(copy)) == w.compute(Checkpoint(model))


def test_nodes_with_a_damaged_copy_do_not_fit(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    own, theirs = (describe(Config(ModelConfig(str(path)))) for path in (model, copy))
    assert mismatch(own, theirs) is None
    [weights] = copy.glob("*.safetensors")
    change(copy, weights.stat().st_size - 20_000, 1000)
    text = mismatch(own, describe(Config(ModelConfig(str(copy)))))
    assert text is not None
    assert text.startswith("content of model: expected ")


def test_it_is_kept_as_long_as_the_files_stay_what_they_are(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(w, "_MIN_KEPT_BYTES", 0)
    config = Config(ModelConfig(str(model), packed_weights_cache=str(tmp_path / "kept")))
    computed: list[str] = []
    compute = w.compute

    def counted(checkpoint: Checkpoint) -> str:
        computed.append(compute(checkpoint))
        return computed[-1]

    monkeypatch.setattr(w, "compute", counted)

    def digest() -> str:
        return w.weights_digest(config, Checkpoint(model))

    assert digest() == digest() == computed[0]
    assert len(computed) == 1
    [weights] = model.glob("*.safetensors")
    os.utime(weights, ns=(0, 0))
    assert digest() == computed[0]
    assert len(computed) == 2  # the file has been written to
    change(model, weights.stat().st_size - 1)
    os.utime(weights)
    assert digest() != computed[0]
    [kept] = (tmp_path / "kept").iterdir()
    for content in ("{", "[]", "{}", '{"digest": 5}'):
        kept.write_text(content)
        assert digest() == computed[2]
    assert len(computed) == 7
    assert "computed again" in caplog.text


def test_small_checkpoints_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    config = Config(ModelConfig(str(model), packed_weights_cache=str(tmp_path / "kept")))
    w.weights_digest(config, Checkpoint(model))
    assert not (tmp_path / "kept").exists()
