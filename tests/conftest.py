"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

GOLDEN_DIR = Path(__file__).resolve().parent / "golden"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the tiny checkpoints, one per architecture, in Hugging Face layout."""
    return GOLDEN_DIR


class _Errors(logging.Handler):
    """What was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


@pytest.fixture
def expects_step_failures() -> None:
    """A test that asks for this makes steps fail."""


@pytest.fixture(autouse=True)
def no_step_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """A step or a drafting method that fails costs a request, or only its drafts: a test must not pass over that."""
    handler = _Errors()
    loggers = [logging.getLogger(f"fastdeploy_sd.{name}") for name in ("worker.runner", "spec_decode.draft_guard")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert not handler.texts or "expects_step_failures" in request.fixturenames
