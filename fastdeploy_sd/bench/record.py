"""The benchmark record: one JSON file per run, with everything needed to judge and repeat it.

Schema version 1:
    schema_version, kind ("offline" | "http" | "speculation" | "forward"), name, created (UTC), git_sha, dirty,
    config: option name -> effective value,
    hardware: {cpu, isa, num_threads, gpu, driver},
    workload: what was asked for,
    metrics: the results; times are {p50, p90, p99} over all repeats, rates the median of the repeats,
    repeats: the same metrics per repeat, with the memory speeds measured before and after it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastdeploy_sd.config import Config, explain
from fastdeploy_sd.config.quantization import read_quantization
from fastdeploy_sd.errors import ConfigError

SCHEMA_VERSION = 1
_PACKAGE = Path(__file__).resolve().parents[1]


def _git(*arguments: str) -> str | None:
    """Output of a git command about the checkout this package is in, None when it is in none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git_sha() -> str | None:
    return _git("rev-parse", "HEAD")


def _is_dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Record:
    """One run; fields as in the module's text."""

    kind: str
    name: str
    config: dict[str, Any]
    hardware: dict[str, Any]
    workload: dict[str, Any]
    metrics: dict[str, Any]
    repeats: list[dict[str, Any]]
    git_sha: str | None = field(default_factory=_git_sha)
    dirty: bool | None = field(default_factory=_is_dirty)
    created: str = field(default_factory=_now)
    schema_version: int = SCHEMA_VERSION

    @property
    def weights(self) -> str:
        """How the weights are stored, in tables: a name, or the formats of a map."""
        quantization = self.config["quantization"]
        if isinstance(quantization, dict):
            quantization = read_quantization(quantization)
        return str(quantization or self.config["dtype"])

    def save(self, folder: Path) -> Path:
        """Write `folder`/`name`.json, replacing an older one, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path


def read_fields(path: Path, version: int, names: set[str]) -> dict[str, Any]:
    """Read the JSON object of a record and check its schema version and field names.

    Raises:
        ConfigError: not such an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"record: expected a readable JSON file, got {path} ({error})") from None
    found = values.get("schema_version") if isinstance(values, dict) else None
    if found != version:
        raise ConfigError(f"record: expected schema_version {version}, got {found!r} in {path}")
    if set(values) != names:
        raise ConfigError(f"record: expected the fields {sorted(names)}, got {sorted(values)} in {path}")
    return dict(values)


def load_record(path: Path) -> Record:
    """Read a record.

    Raises:
        ConfigError: not a record, or of another schema version.
    """
    return Record(**read_fields(path, SCHEMA_VERSION, {f.name for f in fields(Record)}))


def load_records(folder: Path) -> list[Record]:
    """Read every record of a folder, by name.

    Raises:
        ConfigError: no records there, or a file that is none.
    """
    records = [load_record(path) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ConfigError(f"records: expected *.json files in {folder}, got none; run the benchmark first")
    return records


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
