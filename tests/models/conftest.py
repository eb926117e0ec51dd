"""Fixtures of the tests of models: operators for eager decoders, and a checkpoint for packed weights."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from fastdeploy_sd.device.program import paddle_ops
from fastdeploy_sd.ops.operators import declared_ops
from tests.models import golden


@pytest.fixture(scope="session", autouse=True)
def operators() -> None:
    """Decoders without a recording call them; nothing loads operators inside a call."""
    paddle_ops.load(declared_ops())


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a tiny mixture-of-experts checkpoint, to be changed."""
    return pathlib.Path(shutil.copytree(golden.ROOT / "qwen3_moe-tiny", tmp_path / "model"))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where packed weights are kept; does not exist yet."""
    return tmp_path / "deep" / "cache"
