"""A clock that does not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Every look at the clock is one second after the last; without a look, what it shows now."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(time, "perf_counter", look)
    return lambda: now
