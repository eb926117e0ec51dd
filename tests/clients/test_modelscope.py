"""Models by name on ModelScope: its real package, in an environment of its own, against a hub on a local port."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import HERE, python_with
from tests.doubles.modelscope_server import running_modelscope

pytestmark = pytest.mark.long

NAME = "some/model"
CHECKPOINT = {"config.json": b"{}", "model.safetensors": b"a" * 3000, "tokenizer.json": b"{ }"}
OTHERS = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "original/model.safetensors": b"b", "a.gguf": b"c"}
TIMEOUT_S = 120


def test_models_of_modelscope(tmp_path: Path) -> None:
    asked = [
        {"model": NAME, "offline": True},
        {"model": NAME},
        {"model": NAME, "offline": True},
        {"model": NAME, "revision": "v1", "download_dir": str(tmp_path / "mine")},
        {"model": NAME, "revision": "v2"},
        {"model": "some/other"},
    ]
    with running_modelscope({NAME: CHECKPOINT | OTHERS}) as hub:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MODELSCOPE"))}
        own = {"MODELSCOPE_ENDPOINT": hub.url, "MODELSCOPE_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
        command = [str(python_with("modelscope")), str(HERE / "programs" / "modelscope_client.py"), json.dumps(asked)]
        environment = kept | own | {"PYTHONPATH": str(HERE.parents[1])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    uncached, first, cached, tagged, *refused = json.loads(done.stdout.splitlines()[-1])
    assert uncached["refusal"].startswith(
        f"model: '{NAME}' is not in the cache, or not all of it, and nothing is fetched"
    )
    assert first == cached
    assert first["names"] == [NAME]
    folder = Path(first["folder"])
    assert folder.is_relative_to(tmp_path / "cache")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name in CHECKPOINT} == CHECKPOINT
    assert not [p for p in tmp_path.rglob("*") if p.name in ("pytorch_model.bin", "modeling.py", "a.gguf")]
    assert Path(tagged["folder"]).is_relative_to(tmp_path / "mine")
    assert sorted(hub.fetched) == sorted([*CHECKPOINT] * 2), "once for each revision"
    for answer, words in zip(refused, (f"'{NAME}' at v2", "'some/other'"), strict=True):
        assert answer["refusal"].startswith(f"model: {words} could not be fetched from ModelScope (")
