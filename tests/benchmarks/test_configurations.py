"""Every file in benchmarks/yaml that names a model is a configuration the server starts with, and its name says what is
in it. Those without are FastDeploy's; tests/server/test_fastdeploy_commands.py serves some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import CHECKPOINT_DIR
from benchmarks.shapes import SHAPES
from fastdeploy_sd.config import DEMO_MODEL, load_config
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.sources import read_yaml
from fastdeploy_sd.config.splitwise_section import ports_of

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "yaml"
ALL = sorted(FOLDER.glob("*.yaml"))
FILES = [path for path in ALL if "model" in read_yaml(path, Faults())]


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
    role, parallel = config.splitwise.splitwise_role, config.parallel
    sizes = {"tp": parallel.tensor_parallel_size, "dp": parallel.data_parallel_size}
    place = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    place += ["ep"] * parallel.enable_expert_parallel + [role] * (role != "mixed")
    parts = [Path(model).name, config.speculative.label, *place, "cpu"]
    if model != DEMO_MODEL:
        parts.insert(1, str(weights))
    assert path.stem == "-".join(parts)


@pytest.mark.parametrize("path", [path for path in ALL if path not in FILES], ids=lambda path: path.stem)
def test_files_of_fastdeploy_are_read(path: Path) -> None:
    """Several engines are in the name, and of ports that are written for all, each has its own."""
    config = load_config(["--model", DEMO_MODEL, "--config", str(path)])
    num_engines, splitwise = config.parallel.data_parallel_size, config.splitwise
    assert (f"-dp{num_engines}" in path.stem) == (num_engines > 1)
    assert ("-dp" in path.stem) == (num_engines > 1)
    for ports in (splitwise.rdma_comm_ports, splitwise.pd_comm_port):
        own = [ports_of(ports, engine, num_engines) for engine in range(num_engines)]
        assert len({port for part in own for port in part}) == sum(map(len, own))
