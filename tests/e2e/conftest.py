"""The marker of tests that start a real server on a real checkpoint."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "e2e: starts real server processes on a small checkpoint (needs Paddle).")
