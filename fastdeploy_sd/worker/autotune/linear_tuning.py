"""How matrix products go over this machine's memory: measured once per machine and weight format, and kept.

Rank 0 of a group measures, while the others wait, and all of them do as it found: ranks that measured side by side
would take each other's bandwidth, and each would find something else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.process.files import read_json, replacing
from fastdeploy_sd.spec_decode.control.profile import Key
from fastdeploy_sd.worker.autotune.kept_measurements import keep
from fastdeploy_sd.worker.autotune.prefetch import (
    DISTANCES,
    ROWS,
    UNMEASURED,
    Distances,
    measure_distances,
    set_distances,
)
from fastdeploy_sd.worker.autotune.row_blocks import BLOCK_BYTES, TILE_ROWS, Blocking, measure_blocking, set_blocking
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

_VERSION = 3
_log = logging.getLogger(__name__)
# What was not measured in full is measured again after so long: a machine that is never quiet is not read every start.
_RETRY_S = 24 * 3600.0
# What each number of a tuning may be, in the order in which they make one number for the other ranks.
_CHOICES: Sequence[Sequence[int]] = (*[(UNMEASURED, *DISTANCES)] * len(ROWS), TILE_ROWS, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class LinearTuning:
    """Of one weight format; by default what its kernels think best."""

    distances: Distances = field(default_factory=lambda: dict.fromkeys(ROWS, UNMEASURED))
    blocking: Blocking = field(default_factory=Blocking)

    def apply(self, fmt: LinearFormat) -> None:
        """Have products of a format do so from now on."""
        set_distances(fmt, self.distances)
        set_blocking(fmt, self.blocking)

    def code(self) -> int:
        """Return a number >= 0 that holds all."""
        code = 0
        values = (*(self.distances[num_rows] for num_rows in ROWS), self.blocking.tile_rows, self.blocking.block_bytes)
        for value, choices in zip(values, _CHOICES, strict=True):
            code = code * len(choices) + choices.index(value)
        return code

    @classmethod
    def of_code(cls, code: int) -> LinearTuning:
        """Return what a `code` holds."""
        values: list[int] = []
        for choices in reversed(_CHOICES):
            code, index = divmod(code, len(choices))
            values.insert(0, choices[index])
        return cls._of_values(values)

    def to_json(self) -> dict[str, Any]:
        """Return what a file says of it."""
        return {
            "bytes_ahead": {str(num_rows): distance for num_rows, distance in self.distances.items()},
            "tile_rows": self.blocking.tile_rows,
            "block_bytes": self.blocking.block_bytes,
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> LinearTuning:
        """Return what a file says.

        Raises:
            ValueError: it is none of the known choices.
        """
        ahead = values.get("bytes_ahead")
        ahead = ahead if isinstance(ahead, dict) else {}
        found = [*(ahead.get(str(num_rows)) for num_rows in ROWS), values.get("tile_rows"), values.get("block_bytes")]
        numbers: list[int] = []
        for number, choices in zip(found, _CHOICES, strict=True):
            if type(number) is not int or number not in choices:
                raise ValueError(f"expected one of {', '.join(map(str, choices))}, got {number!r}")
            numbers.append(number)
        return cls._of_values(numbers)

    @classmethod
    def _of_values(cls, values: Sequence[int]) -> LinearTuning:
        """One of each of _CHOICES."""
        *distances, tile_rows, block_bytes = values
        return cls(dict(zip(ROWS, distances, strict=True)), Blocking(tile_rows, block_bytes))


def tune_linear(
    formats: Collection[LinearFormat], machine: Key, folder: Path | None, group: RankGroup, *, is_worth: bool
) -> None:
    """Tune products of weight formats, as kept in a folder; measured now, and kept, where nothing fits.

    All ranks of a group call it, with the same formats.

    Where a machine did something else meanwhile it has told nothing: such products do as their kernels think best, and
    are measured again a day later.

    Args:
        machine: what it depends on.
        folder: None = there is none, and it is measured at every start.
        is_worth: on rank 0: whether the model is large enough for anything to gain.
    """
    for fmt in formats:
        code = group.of_first(partial(_own_code, fmt, machine, folder, is_worth))
        LinearTuning.of_code(code).apply(fmt)


def measure(fmt: LinearFormat) -> tuple[LinearTuning, bool]:
    """Return what is best, and whether the machine was quiet throughout."""
    distances, is_quiet = measure_distances(fmt)
    blocking, was_quiet = measure_blocking(fmt)
    return LinearTuning(distances, blocking), is_quiet and was_quiet


def _own_code(fmt: LinearFormat, machine: Key, folder: Path | None, is_worth: bool) -> int:
    return (_own(fmt, machine, folder) if is_worth else LinearTuning()).code()


def _own(fmt: LinearFormat, machine: Key, folder: Path | None) -> LinearTuning:
    path = None if folder is None else folder / _name(fmt, machine)
    kept = None if path is None else _load(path, machine)
    if kept is not None:
        return kept
    begin = time.perf_counter()
    tuning, is_quiet = measure(fmt)
    place = keep(path, True, partial(_save, machine, tuning, is_quiet))
    tuned = "tuned" if is_quiet else "tuned in part, as something else runs on this machine,"
    _log.info("products of %s weights: %s in %.1f s, %s", fmt, tuned, time.perf_counter() - begin, place)
    return tuning


def _name(fmt: LinearFormat, machine: Key) -> str:
    text = json.dumps(dict(machine), sort_keys=True)
    return f"linear-{fmt}-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def _load(path: Path, machine: Key) -> LinearTuning | None:
    """Return what a file says; None = there is none that fits this version and machine, or it is time to try again."""
    try:
        values = read_json(path, missing_ok=True)
    except CheckpointError as error:
        _log.warning("products of weights: tuned again: %s", error)
        return None
    if (values.get("version"), values.get("machine")) != (_VERSION, dict(machine)):
        return None
    try:
        return LinearTuning.of_json(values) if _holds(values) else None
    except ValueError as error:
        _log.warning("products of weights: tuned again: %s: %s", path, error)
        return None


def _holds(values: dict[str, Any]) -> bool:
    """Whether what a file says was measured in full, or not long ago.

    Raises:
        ValueError: it does not say.
    """
    was_quiet, begin = values.get("was_quiet"), values.get("measured_at")
    if type(was_quiet) is not bool or type(begin) is not int:
        raise ValueError(
            f"was_quiet, measured_at: expected true or false, and an integer, got {was_quiet!r}, {begin!r}"
        )
    return was_quiet or 0 <= time.time() - begin < _RETRY_S


def _save(machine: Key, tuning: LinearTuning, was_quiet: bool, path: Path) -> None:
    about = {"version": _VERSION, "machine": dict(machine), "was_quiet": was_quiet, "measured_at": int(time.time())}
    values = {**about, **tuning.to_json()}
    with replacing(path) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())
