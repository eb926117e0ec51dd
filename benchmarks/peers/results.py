"""The records of a comparison: one JSON file per metric and bits, written when all peers of it are measured.

Schema version 1:
    schema_version, metric, bits, created (UTC), settings: what was asked for,
    git_sha: the commit, with "-dirty-" and a digest where it had changes, null outside of a checkout,
    machine: {cpu, num_cpus},
    rounds: [{read_gb_per_s, core_latency_ns, matmul_gflops, foreign_cpus}], measured before each round,
    peers: peer -> {format, versions, kv_type, notes, failed: reason or null},
    cases: [{case, peer, work, seconds: [[of a round], ...], failed: reason or null}].

`seconds` are single samples; `work` is the number of tokens that one sample computes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fastdeploy_sd.bench.record import read_fields
from fastdeploy_sd.errors import ConfigError

SCHEMA_VERSION = 1
_FIELDS = {"metric", "bits", "created", "git_sha", "settings", "machine", "rounds", "peers", "cases"}


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

    def min_seconds(self) -> float:
        """The fastest sample."""
        return min(min(samples) for samples in self.seconds)

    def tokens_per_s(self) -> float:
        """Tokens per second at the median."""
        return self.work / self.median_seconds()


@dataclass(slots=True)
class Group:
    """All peers in one metric at one number of bits; fields as in the module's text."""

    metric: str
    bits: str
    created: str
    git_sha: str | None
    settings: dict[str, Any]
    machine: dict[str, Any]
    rounds: list[dict[str, float]] = field(default_factory=list)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.metric}-{self.bits}"

    def find(self, case: str, peer: str) -> Case | None:
        """The cell, None where it was not measured or failed."""
        found = [c for c in self.cases if c.case == case and c.peer == peer and c.failed is None and c.seconds]
        return found[0] if found else None

    def case_names(self) -> list[str]:
        """In order of measurement."""
        return list(dict.fromkeys(c.case for c in self.cases))

    def save(self, folder: Path) -> Path:
        """Write the record, replacing an older one, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return path


def load_group(path: Path) -> Group:
    """Read a record.

    Raises:
        ConfigError: not a record, or of another schema version.
    """
    values = read_fields(path, SCHEMA_VERSION, _FIELDS | {"schema_version"})
    del values["schema_version"]
    values["cases"] = [Case(**case) for case in values["cases"]]
    return Group(**values)


def load_groups(folder: Path) -> list[Group]:
    """Read every record of a folder, by name.

    Raises:
        ConfigError: no records there, or a file that is none.
    """
    groups = [load_group(path) for path in sorted(folder.glob("*.json"))]
    if not groups:
        raise ConfigError(f"records: expected *.json files in {folder}, got none; run the comparison first")
    return groups


def speed_ratios(case: Case, other: Case) -> list[float]:
    """Per round, the speed of `case` over that of `other`; both were measured in the same rounds."""
    times = zip(case.round_seconds(), other.round_seconds(), strict=True)
    return [(case.work / mine) / (other.work / theirs) for mine, theirs in times]
