from __future__ import annotations

import pytest

from fastdeploy_sd.ops import shim


@pytest.fixture(scope="session", autouse=True)
def operators() -> None:
    """Paddle's side of the cases; nothing loads operators inside a call."""
    shim.load()
