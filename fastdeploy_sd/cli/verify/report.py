"""The matrix as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastdeploy_sd.cli.verify.matrix import Cell, Matrix

_GAP = "  "
_TOTAL = "drafts accepted / verified"


def matrix_table(matrix: Matrix, width: int = 120) -> str:
    """Return ways x methods as text tables of at most `width` columns (one method at least in each).

    A cell is "ok" or "DIFFERS", and the mean number of tokens per verification where drafts were verified.
    """
    head = max(len(name) for name in (*matrix.ways, _TOTAL))
    columns = [_column(matrix, method) for method in matrix.methods]
    return "\n\n".join(
        "\n".join(_lines(["", *matrix.ways, _TOTAL], head, group)) for group in _groups(columns, width - head)
    )


def findings(matrix: Matrix, unavailable: Mapping[str, str]) -> list[str]:
    """Return one line per difference, per gap, per warning and per reason why methods could not be loaded."""
    lines = [f"DIFFERS: {c.method}, {c.way}: {c.difference}" for c in matrix.differences]
    lines += [f"not shown: {gap}" for gap in matrix.gaps]
    lines += [f"WARNING: {text}: equality was shown for the other kind only" for text in matrix.warnings]
    names: dict[str, list[str]] = {}
    for name, reason in unavailable.items():
        names.setdefault(reason, []).append(name)
    return lines + [f"not available: {', '.join(group)}: {reason}" for reason, group in names.items()]


def matrix_json(matrix: Matrix, unavailable: Mapping[str, str]) -> dict[str, Any]:
    """Return everything the tables say, and the counts that they come from."""
    return {
        "is_proof": matrix.is_proof,
        "ways": list(matrix.ways),
        "methods": list(matrix.methods),
        "gaps": matrix.gaps,
        "warnings": matrix.warnings,
        "unavailable": dict(unavailable),
        "cells": [asdict(cell) for cell in matrix.cells.values()],
    }


def _column(matrix: Matrix, method: str) -> list[str]:
    total = matrix.column(method)
    cells = [_cell_text(matrix.cells[way, method]) for way in matrix.ways]
    return [method, *cells, f"{total.num_accepted} / {total.num_drafts}" if total.num_drafts else "-"]


def _cell_text(cell: Cell) -> str:
    verdict = "ok" if cell.is_equal else "DIFFERS"
    return f"{verdict} {cell.num_emitted / cell.num_verifications:.2f}" if cell.num_verifications else verdict


def _groups(columns: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Yield as many columns at a time as fit into `width`."""
    group: list[list[str]] = []
    used = 0
    for column in columns:
        needed = len(_GAP) + max(map(len, column))
        if group and used + needed > width:
            yield group
            group, used = [], 0
        group.append(column)
        used += needed
    yield group


def _lines(heads: Sequence[str], head_width: int, group: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in group]
    for i, head in enumerate(heads):
        cells = [f"{column[i]:<{width}}" for column, width in zip(group, widths, strict=True)]
        yield _GAP.join([f"{head:<{head_width}}", *cells]).rstrip()
