"""Measured times of steps and drafting on a machine, and the file that keeps them between starts.

The file is a JSON object:

    {"version": 5, "machine": {"cpu": "..", ..}, "model": {"fingerprint": "..", ..},
     "steps":  [{"rows": 1, "requests": 1, "context": 64, "ms": 0.28}, ..],
     "drafts": [{"method": "mtp", "requests": 1, "drafts": 3, "context": 64, "ms": 0.36}, ..]}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process.files import describe, read_text, replacing

VERSION = 5
_MAX_BYTES = 1 << 20
_SAMPLES = ("steps", "drafts")
_MOST = (1 << 31) - 1
Key = Mapping[str, str | int]
Sample = TypeVar("Sample", "StepSample", "DraftSample")


@dataclass(frozen=True, slots=True)
class StepSample:
    """The milliseconds, > 0, of one target step, drafting left out.

    Attributes:
        rows: tokens of the step, of all requests together.
        requests: with equally many rows each; 0 = the rows are one part of a prompt, without an output token.
        context: tokens of each request before its rows.
    """

    rows: int
    requests: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True)
class DraftSample:
    """The milliseconds, > 0, of one call of a drafting method: drafts per request, and tokens of each context."""

    method: str
    requests: int
    drafts: int
    context: int
    ms: float


@dataclass(frozen=True, slots=True)
class CostProfile:
    """The times of one model on one machine.

    Attributes:
        machine: processor, instruction-set level, threads, ranks.
        model: its weights and their formats, and its drafting methods.
        steps: ascending by requests, context and rows; at least one, of one row of one request.
        drafts: ascending by method, requests, drafts.
    """

    machine: Key
    model: Key
    steps: tuple[StepSample, ...]
    drafts: tuple[DraftSample, ...] = ()

    def best_case(self, method: str) -> tuple[DraftSample, float, float] | None:
        """Return what a method's drafts bring one request at best: if all were right.

        Returns:
            A call, the ms of a step without drafts, and the speed-up over such steps; None = no call was measured.
        """
        calls = [sample for sample in self.drafts if (sample.method, sample.requests) == (method, 1)]
        alone = [sample for sample in self.steps if sample.requests == 1]
        context = min(sample.context for sample in alone)
        rows, ms = zip(*((s.rows, s.ms) for s in alone if s.context == context), strict=True)
        gains = [(1 + s.drafts) * ms[0] / (float(np.interp(1 + s.drafts, rows, ms)) + s.ms) for s in calls]
        best = max(range(len(calls)), key=gains.__getitem__, default=None)
        return None if best is None else (calls[best], ms[0], gains[best])

    def fits(self, machine: Key, model: Key) -> bool:
        return dict(self.machine) == dict(machine) and dict(self.model) == dict(model)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all, in place of an older one; raises OSError."""
        values = {"version": VERSION, "machine": dict(self.machine), "model": dict(self.model)}
        lists = {name: [asdict(sample) for sample in getattr(self, name)] for name in _SAMPLES}
        with replacing(path) as file:
            file.write((json.dumps(values | lists, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; raises FileNotFoundError for none, and ConfigError for any other that is no such file."""
        try:
            found = json.loads(read_text(path, _MAX_BYTES))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"profile: expected a readable JSON file, got {path} ({describe(error)})") from None
        try:
            return cls._of_json(found)
        except _FieldError as error:
            raise ConfigError(f"profile: {path}: {error}") from None

    @classmethod
    def _of_json(cls, found: object) -> Self:
        values = _object("the file", found, ("version", "machine", "model", *_SAMPLES))
        if values["version"] != VERSION or isinstance(values["version"], bool):
            raise _FieldError(f"version: expected {VERSION}, got {values['version']!r}")
        steps = _samples("steps", values["steps"], StepSample)
        if not any((sample.rows, sample.requests) == (1, 1) for sample in steps):
            raise _FieldError("steps: expected one of one row of one request, got none")
        drafts = _samples("drafts", values["drafts"], DraftSample)
        return cls(_key("machine", values["machine"]), _key("model", values["model"]), steps, drafts)


def profile_name(machine: Key, model: Key) -> str:
    text = json.dumps([dict(machine), dict(model)], sort_keys=True)
    return f"costs-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


class _FieldError(Exception):
    """The text names the field that is wrong."""


def _object(where: str, found: object, names: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        got = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise _FieldError(f"{where}: expected an object of {', '.join(names)}, got {got}")
    return found


def _key(name: str, found: object) -> Key:
    if not isinstance(found, dict) or not all(type(value) in (str, int) for value in found.values()):
        raise _FieldError(f"{name}: expected an object of texts and integers, got {found!r:.200}")
    return found


def _samples(name: str, found: object, kind: type[Sample]) -> tuple[Sample, ...]:
    if not isinstance(found, list):
        raise _FieldError(f"{name}: expected a list, got {type(found).__name__}")
    return tuple(_sample(f"{name}[{i}]", entry, kind) for i, entry in enumerate(found))


def _sample(where: str, found: object, kind: type[Sample]) -> Sample:
    values = _object(where, found, [field.name for field in fields(kind)])
    for name, value in values.items():
        if name == "method":
            if not isinstance(value, str):
                raise _FieldError(f"{where}.{name}: expected a text, got {value!r:.200}")
        elif name == "ms":
            if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
                raise _FieldError(f"{where}.{name}: expected a positive number, got {value!r:.200}")
        else:
            least = 0 if name in ("context", "requests") else 1
            if type(value) is not int or not least <= value <= _MOST:
                raise _FieldError(f"{where}.{name}: expected an integer of at least {least}, got {value!r:.200}")
    return kind(**values)
