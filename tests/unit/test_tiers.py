"""The tiers of the tests: folders whose tests start processes or load models are slow unless a file says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import begun_with

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


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_every_process_begins_with_its_share_of_what_takes_long(num_parts: int) -> None:
    is_long = [i % 4 == 1 for i in range(24)]  # 6 of them
    order = begun_with(is_long, num_parts)
    assert sorted(order) == list(range(24))
    size = 24 // num_parts
    for begin in range(0, 24, size):
        assert [is_long[i] for i in order[begin : begin + size]] == [True] * (6 // num_parts) + [False] * (
            size - 6 // num_parts
        )


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_test_is_lost_where_there_are_fewer_than_processes(count: int) -> None:
    for num_long in range(count + 1):
        assert sorted(begun_with([i < num_long for i in range(count)], 3)) == list(range(count))
