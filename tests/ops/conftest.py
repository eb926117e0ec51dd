from __future__ import annotations

import pytest

from fastdeploy_sd.ops.operators import declared_ops
from fastdeploy_sd.runtime import paddle_ops


@pytest.fixture(scope="session", autouse=True)
def operators(pytestconfig: pytest.Config) -> None:
    """Paddle's side of the cases, which `--fast` leaves out; nothing loads operators inside a call."""
    if not pytestconfig.getoption("fast"):
        paddle_ops.load(declared_ops())
