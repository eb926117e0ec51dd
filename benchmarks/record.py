"""The benchmark record: one JSON file per run, with everything needed to judge and repeat it.

Every record has schema_version, created (UTC) and git_sha: the commit, with "-dirty-" and a digest where it had
changes, null outside of a checkout. Those of the comparison with other servers are in peers/results.py; the others,
schema version 2, have
    kind ("offline" | "http" | "speculation"), name,
    config: option name -> effective value,
    hardware: {cpu, isa, num_threads, gpu, driver},
    workload: what was asked for,
    metrics: the results; times are {p50, p90, p99} over all repeats, rates the median of the repeats,
    repeats: the same metrics per repeat, with the memory speeds measured before and after it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from fastdeploy_sd.config import Config, explain
from fastdeploy_sd.config.quantization import read_quantization
from fastdeploy_sd.errors import ConfigError

RANKS = (50, 90, 99)
Percentiles = dict[str, float]
ROOT = Path(__file__).resolve().parents[1]
# What is built and run: new files elsewhere, e.g. records, change no figure.
_SOURCES = ("benchmarks", "custom_ops", "fastdeploy_sd")
_SUFFIXES = frozenset({".cc", ".h", ".py"})
_DIGEST_LEN = 8


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return {"p50": .., "p90": .., "p99": ..}, linearly interpolated; None of no values."""
    if not values:
        return None
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in RANKS}


def revision(root: Path = ROOT) -> str | None:
    """The commit of a checkout, None where there is none.

    With uncommitted changes "-dirty-" and a digest of them follow, so that two states of the sources never have the
    same name.
    """
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "diff", "HEAD", "--binary")
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *_SOURCES)
    if commit is None or changes is None or untracked is None:
        return None
    digest = hashlib.sha256(changes)
    names = [name for name in untracked.decode().split("\0") if Path(name).suffix in _SUFFIXES]
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    is_dirty = bool(changes or names)
    return commit.decode().strip() + (f"-dirty-{digest.hexdigest()[:_DIGEST_LEN]}" if is_dirty else "")


def _git(root: Path, *arguments: str) -> bytes | None:
    """What a git command prints, None when it fails or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def now() -> str:
    """The time, as it is in records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(slots=True, kw_only=True)
class RecordFile:
    """A record and its file; what is read is equal to what was written."""

    schema_version: ClassVar[int]

    created: str = field(default_factory=now)
    # When the first record is made: what runs is what was read then.
    git_sha: str | None = field(default_factory=cache(revision))

    @property
    def file_name(self) -> str:
        """Without suffix; no two records of a folder share it."""
        raise NotImplementedError

    def save(self, folder: Path) -> Path:
        """Write the file, replacing an older one, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.file_name}.json"
        text = json.dumps({"schema_version": self.schema_version, **asdict(self)}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: not such a record, or of another schema version.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"record: expected a readable JSON file, got {path} ({error})") from None
        found = values.pop("schema_version", None) if isinstance(values, dict) else None
        if found != cls.schema_version:
            raise ConfigError(f"record: expected schema_version {cls.schema_version}, got {found!r} in {path}")
        names = sorted(f.name for f in fields(cls))
        if sorted(values) != names:
            raise ConfigError(f"record: expected the fields {names}, got {sorted(values)} in {path}")
        return cls(**values)

    @classmethod
    def load_all(cls, folder: Path) -> list[Self]:
        """Read every file of a folder, by name.

        Raises:
            ConfigError: no records there, or a file that is none.
        """
        records = [cls.load(path) for path in sorted(folder.glob("*.json"))]
        if not records:
            raise ConfigError(f"records: expected *.json files in {folder}, got none; run the benchmark first")
        return records


@dataclass(slots=True, kw_only=True)
class Record(RecordFile):
    """One run; fields as in the module's text."""

    schema_version: ClassVar[int] = 2

    kind: str
    name: str
    config: dict[str, Any]
    hardware: dict[str, Any]
    workload: dict[str, Any]
    metrics: dict[str, Any]
    repeats: list[dict[str, Any]] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        return self.name

    @property
    def weights(self) -> str:
        """How the weights are stored, in tables: a name, or the formats of a map."""
        quantization = self.config["quantization"]
        if isinstance(quantization, dict):
            quantization = read_quantization(quantization)
        return str(quantization or self.config["dtype"])


def config_json(config: Config) -> dict[str, Any]:
    """Return every option with its effective value, secrets hidden; speculative_config is a map of its own keys."""
    values: dict[str, Any] = {}
    for row in explain(config):
        section, dot, key = row.name.partition(".")
        if dot:
            values.setdefault(section, {})[key] = row.value
        else:
            values[row.name] = row.value
    return values
