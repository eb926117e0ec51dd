from __future__ import annotations

import pytest

from fastdeploy_sd.ops.operators import declared_ops
from fastdeploy_sd.runtime import paddle_ops


@pytest.fixture(scope="session", autouse=True)
def operators() -> None:
    """Paddle's side of the cases; nothing loads operators inside a call."""
    paddle_ops.load(declared_ops())
