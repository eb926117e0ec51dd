"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN_DIR = Path(__file__).resolve().parent / "golden"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the tiny checkpoints, one per architecture, in Hugging Face layout."""
    return GOLDEN_DIR
