"""Every file in benchmarks/yaml that names a model is a configuration the server starts with, and its name says what is
in it. Those without are FastDeploy's: tests/server/test_fastdeploy_commands.py has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import CHECKPOINT_DIR
from benchmarks.shapes import SHAPES
from fastdeploy_sd.config import DEMO_MODEL, load_config
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.sources import read_yaml

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "yaml"
FILES = [path for path in sorted(FOLDER.glob("*.yaml")) if "model" in read_yaml(path, Faults())]


def test_there_are_configurations() -> None:
    assert len(FILES) >= 4


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_configuration_is_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_yaml(path, Faults())["model"].value
    assert isinstance(model, str)
    if model != DEMO_MODEL:
        # The checkpoint is written when it is first used; only its place and name are checked here.
        assert Path(model).parent == CHECKPOINT_DIR
        monkeypatch.chdir(tmp_path)
        Path(model).mkdir(parents=True)
        Path(model, "config.json").write_text(json.dumps(dict(SHAPES[Path(model).name])))
    config = load_config(["--config", str(path)])
    weights = config.model.quantization or {"bfloat16": "bf16"}.get(config.model.dtype, config.model.dtype)
    role, num_ranks = config.splitwise.splitwise_role, config.parallel.tensor_parallel_size
    place = ([] if role == "mixed" else [role]) + ([] if num_ranks == 1 else [f"tp{num_ranks}"])
    parts = [Path(model).name, config.speculative.label, *place, "cpu"]
    if model != DEMO_MODEL:
        parts.insert(1, str(weights))
    assert path.stem == "-".join(parts)
