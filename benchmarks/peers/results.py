"""The records of a comparison: one JSON file per metric and bits, written when all peers of it are measured.

Schema version 1, with what every record has (see benchmarks/record.py):
    metric, bits, settings: what was asked for,
    machine: {cpu, num_cpus},
    rounds: [{read_gb_per_s, core_latency_ns, matmul_gflops, foreign_cpus}], measured before each round,
    peers: peer -> {format, versions, kv_type, notes, failed: reason or null},
    cases: [{case, peer, work, seconds: [[of a round], ...], failed: reason or null}].

`seconds` are single samples; `work` is the number of tokens that one sample computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

from benchmarks.record import RecordFile


@dataclass(slots=True)
class Case:
    """What one peer did in one cell of the comparison.

    Attributes:
        case: of the metric, e.g. "8" for a batch of eight.
        work: tokens per sample.
        seconds: samples per round; rounds are in the same order for all peers.
        failed: why there is no figure; such a cell is shown as "-".
    """

    case: str
    peer: str
    work: int
    seconds: list[list[float]] = field(default_factory=list)
    failed: str | None = None

    def round_seconds(self) -> list[float]:
        """The median sample of every round."""
        return [median(samples) for samples in self.seconds]

    def median_seconds(self) -> float:
        """The median over the rounds."""
        return median(self.round_seconds())

    def tokens_per_s(self) -> float:
        """Tokens per second at the median."""
        return self.work / self.median_seconds()


@dataclass(slots=True, kw_only=True)
class Group(RecordFile):
    """All peers in one metric at one number of bits; fields as in the module's text."""

    schema_version: ClassVar[int] = 1

    metric: str
    bits: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    rounds: list[dict[str, float]] = field(default_factory=list)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the cases of a file what they were."""
        self.cases = [Case(**case) if isinstance(case, dict) else case for case in self.cases]

    @property
    def file_name(self) -> str:
        return f"{self.metric}-{self.bits}"

    def find(self, case: str, peer: str) -> Case | None:
        """The cell, None where it was not measured or failed."""
        found = [c for c in self.cases if c.case == case and c.peer == peer and c.failed is None and c.seconds]
        return found[0] if found else None

    def case_names(self) -> list[str]:
        """In order of measurement."""
        return list(dict.fromkeys(c.case for c in self.cases))


def speed_ratios(case: Case, other: Case) -> list[float]:
    """Per round, the speed of `case` over that of `other`; both were measured in the same rounds."""
    times = zip(case.round_seconds(), other.round_seconds(), strict=True)
    return [(case.work / mine) / (other.work / theirs) for mine, theirs in times]
