"""Meaning of signal_."""

from __future__ import annotations

from fastdeploy_sd.types import I32, I64


def signal_(positions: I32, counter: I64, event_fd: int) -> None:
    """Add 1 to the counter; waking is no part of the meaning."""
    counter += 1
