"""The progress bar: one line redrawn on a terminal, few lines in a log."""

from __future__ import annotations

import io

import pytest

from benchmarks.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_line_is_redrawn() -> None:
    stream = Terminal()
    progress = Progress(2, "work", stream)
    progress.advance("second")
    progress.advance()
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().split("\r\x1b[2K")[1:] == [
        "work [" + "." * 30 + "] 0/2",
        "work [" + "#" * 15 + "." * 15 + "] 1/2 second",
        "work [" + "#" * 30 + "] 2/2\n",
    ]


@pytest.mark.parametrize(("total", "num_lines"), [(1, 2), (4, 5), (200, 11)])
def test_log_stays_short(total: int, num_lines: int) -> None:
    stream = io.StringIO()
    progress = Progress(total, "work", stream)
    for _ in range(total):
        progress.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == num_lines
    assert lines[-1].endswith(f"{total}/{total}")
