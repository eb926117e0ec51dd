"""The tiers of the tests: folders whose tests start processes or load models are slow unless a file says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SLOW_FOLDERS = ("clients", "conformance", "e2e", "engine", "fuzz", "server", "splitwise")


@pytest.mark.parametrize("folder", SLOW_FOLDERS)
def test_every_module_of_a_slow_folder_is_marked(folder: str) -> None:
    unmarked = [
        path.name
        for path in sorted((TESTS / folder).rglob("test_*.py"))
        if not any(
            line.startswith("pytestmark = ") and ("mark.slow" in line or "mark.long" in line)
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    ]
    assert unmarked == []
