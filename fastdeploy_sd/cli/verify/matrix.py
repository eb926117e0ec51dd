"""Ways x methods: each cell runs the requests in one way with one method and compares with plain decoding alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fastdeploy_sd.cli.verify.answers import Answer, Difference, compare
from fastdeploy_sd.cli.verify.methods import Method
from fastdeploy_sd.cli.verify.runs import Reference, open_engine, run
from fastdeploy_sd.cli.verify.variants import EngineVariant
from fastdeploy_sd.config import Config
from fastdeploy_sd.types import DraftSource, Request, RequestId
from fastdeploy_sd.types.stats import EngineStats, SourceCounts


@dataclass(frozen=True, slots=True)
class Cell:
    """What one way with one method gave.

    Attributes:
        difference: the first one, None = all answers are equal.
        missing: what should have happened and did not ("no preemption", "no prefix hit"), None = everything did.
        num_drafts, num_accepted: drafts of the method verified / accepted.
        num_forced: drafts verified that grammars force, whatever the method.
        num_verifications: rows that had drafts to verify.
        num_emitted: their output tokens.
    """

    way: str
    method: str
    difference: Difference | None = None
    missing: str | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    num_forced: int = 0
    num_verifications: int = 0
    num_emitted: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether the answers are those of plain decoding."""
        return self.difference is None


@dataclass(frozen=True, slots=True)
class Matrix:
    """All cells.

    What was not exercised is a gap where the matrix itself could have seen to it, and a warning where it depends on the
    model: drafts of random MTP layers are never right.

    Attributes:
        cells: by (way, method).
        idle_methods: methods that could draft, but did not in any cell.
        unforced_methods: those with which no cell verified a token that a grammar forces, though requests had grammars.
    """

    ways: tuple[str, ...]
    methods: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    idle_methods: tuple[str, ...] = ()
    unforced_methods: tuple[str, ...] = ()

    @property
    def differences(self) -> list[Cell]:
        """The cells whose answers differ."""
        return [cell for cell in self.cells.values() if not cell.is_equal]

    @property
    def gaps(self) -> list[str]:
        """What the matrix did not show, one sentence each."""
        idle = [f"{method}: nothing was drafted in any way" for method in self.idle_methods]
        idle += [f"{method}: no token that a grammar forces was drafted in any way" for method in self.unforced_methods]
        return idle + [f"{c.method}, {c.way}: {c.missing}" for c in self.cells.values() if c.missing]

    @property
    def warnings(self) -> list[str]:
        """Methods whose drafts had one fate only, over all ways; one sentence each."""
        columns = [column for column in map(self.column, self.methods) if column.num_drafts]
        return [
            f"{c.method}: no draft was {fate} in any way"
            for c in columns
            for fate, count in (("accepted", c.num_accepted), ("rejected", c.num_drafts - c.num_accepted))
            if count == 0
        ]

    @property
    def is_proof(self) -> bool:
        """Whether there is neither a difference nor a gap."""
        return not self.differences and not self.gaps

    def column(self, method: str) -> Cell:
        """The counts of a method over all ways."""
        cells = [cell for cell in self.cells.values() if cell.method == method]
        return Cell(
            way="all",
            method=method,
            num_drafts=sum(c.num_drafts for c in cells),
            num_accepted=sum(c.num_accepted for c in cells),
            num_forced=sum(c.num_forced for c in cells),
            num_verifications=sum(c.num_verifications for c in cells),
            num_emitted=sum(c.num_emitted for c in cells),
        )


def run_cell(
    base: Config, way: EngineVariant, method: Method, requests: Sequence[Request], expected: Mapping[RequestId, Answer]
) -> Cell:
    """Run the way's share of the requests and compare every pass with `expected`.

    Raises:
        CheckpointError, ConfigError: the model or the method cannot be loaded.
        AssertionError: an invariant of the engine broke.
    """
    todo = method.apply(requests[: way.num_requests])
    difference = None
    with open_engine(base, way, method) as engine:
        for number in range(way.num_passes):
            answers = run(engine, [_renamed(r, number) for r in todo], way.arrivals_per_step)
            wanted = {_renamed(r, number).request_id: expected[r.request_id] for r in todo}
            difference = difference or compare(wanted, answers)
        stats = engine.stats()
    forced = stats.drafts.get(DraftSource.GRAMMAR.name.lower(), SourceCounts())
    return Cell(
        way=way.name,
        method=method.name,
        difference=difference,
        missing=_missing(way, stats),
        num_drafts=stats.num_draft_tokens - sum(forced.drafted),
        num_accepted=stats.num_accepted_tokens - sum(forced.accepted),
        num_forced=sum(forced.drafted),
        num_verifications=stats.num_verified_rows,
        num_emitted=stats.num_emitted_tokens,
    )


def run_matrix(
    reference: Reference,
    ways: Sequence[EngineVariant],
    methods: Sequence[Method],
    on_cell: Callable[[Cell], object] | None = None,
) -> Matrix:
    """Run every way with every method.

    `on_cell`: told each cell as it is done. Raises CheckpointError, ConfigError, AssertionError: as run_cell.
    """
    cells = {}
    for method in methods:
        for way in ways:
            cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
            cells[way.name, method.name] = cell
            if on_cell is not None:
                on_cell(cell)
    matrix = Matrix(tuple(w.name for w in ways), tuple(m.name for m in methods), cells)
    columns = {m.name: matrix.column(m.name) for m in methods if m.is_drafting}
    is_guided = any(request.grammar for request in reference.requests)
    return replace(
        matrix,
        idle_methods=tuple(name for name, column in columns.items() if column.num_drafts == 0),
        unforced_methods=tuple(name for name, column in columns.items() if is_guided and column.num_forced == 0),
    )


def _renamed(request: Request, number: int) -> Request:
    """A request may not come twice under one name; the first pass keeps the names that proposers may know."""
    return request if number == 0 else replace(request, request_id=f"{request.request_id}-again-{number}")


def _missing(way: EngineVariant, stats: EngineStats) -> str | None:
    if way.must_preempt and stats.num_preemptions == 0:
        return "no preemption"
    if way.must_hit and stats.num_prefix_hit_tokens == 0:
        return "no prefix hit"
    return None
