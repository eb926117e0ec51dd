"""Loads the kernel library (libfdsd.so) and its process-wide settings. Knows no tensors and no framework.

The instruction-set level is the processor's best, unless FDSD_ISA names a lower one (scalar, avx2, avx512, amx).
A library of other C functions or structs than these sources declare is refused: every caller here relies on them.
Threads are as many as the processors of this process are worth, until another number is set.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from fastdeploy_sd import __version__
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.errors import ConfigError

ISA_LEVELS = ("scalar", "avx2", "avx512", "amx")
# Where a checkout has the sources.
SOURCES = pathlib.Path(__file__).resolve().parents[2] / "custom_ops"
LIBRARY_PATH = pathlib.Path(__file__).resolve().parent.parent / "lib" / "libfdsd.so"


class CParams(ctypes.Structure):
    """Base of the ctypes structures for the params structs in custom_ops/include/fdsd."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded kernel library.

    Raises ConfigError: the library was not built, or from other sources than these, or FDSD_ISA names an unknown or
    unsupported level.
    """
    lib = load(LIBRARY_PATH)
    for name in ("fdsd_set_isa", "fdsd_set_num_threads", "fdsd_amx_refusal", "fdsd_assume_tiles"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.fdsd_set_num_threads(own_processors().num_threads, own_processors().at_once)
    wanted = os.environ.get("FDSD_ISA")
    if wanted is not None:
        _set_isa(lib, wanted)
    return lib


def load(path: pathlib.Path) -> ctypes.CDLL:
    """Return the kernel library in a file, without any setting.

    Raises ConfigError: there is none, or it was built from other declarations than these.
    """
    if not path.exists():
        raise ConfigError(f"kernel library: expected {path}, got no such file; run `scripts/dev build`")
    lib = ctypes.CDLL(str(path))
    other: str | None = "an older version"
    if hasattr(lib, "fdsd_sources"):
        lib.fdsd_sources.restype = ctypes.c_char_p
        other = other_source(lib.fdsd_sources().decode())
    if other is not None:
        raise ConfigError(
            f"kernel library: expected {path} to be of these sources, got one of {other}; run `scripts/dev build`, "
            "without a checkout install the package anew"
        )
    return lib


def other_source(listed: str) -> str | None:
    """Return the first source that a library was compiled from and that is not what is here, None if all is the same.

    Args:
        listed: the package's version, then a line `path SHA-256` for every source, by its path below custom_ops/.
            Without sources the version is compared.
    """
    version, *sources = listed.splitlines()
    if not SOURCES.joinpath("include", "fdsd").is_dir():
        return None if version == __version__ else f"fastdeploy_sd {version}, not {__version__}"
    for name, digest in map(str.split, sources):
        path = SOURCES / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return f"another {path}"
    return None


def _set_isa(lib: ctypes.CDLL, name: str) -> None:
    if name not in ISA_LEVELS:
        raise ConfigError(f"FDSD_ISA: expected one of {', '.join(ISA_LEVELS)}, got {name!r}")
    error = lib.fdsd_set_isa(ISA_LEVELS.index(name))
    if error:
        reason = f" ({lib.fdsd_amx_refusal().decode()})" if name == "amx" else ""
        raise ConfigError(f"FDSD_ISA: {error.decode()}, got {name!r}{reason}")


@functools.cache
def function(name: str) -> Callable[[Any], bytes | None]:
    """Return op `fdsd_<name>`: takes the params by reference, returns the text of an error."""
    found = getattr(library(), f"fdsd_{name}")
    found.restype = ctypes.c_char_p
    return cast("Callable[[Any], bytes | None]", found)


def returned(name: str, kind: Any, *arguments: Any) -> Any:
    """Call `fdsd_<name>`, which returns a value of a ctypes type."""
    found = getattr(library(), f"fdsd_{name}")
    found.restype = kind
    return found(*arguments)


def function_address(name: str) -> int:
    """Return where op `fdsd_<name>` is, for native code that calls it."""
    return ctypes.cast(getattr(library(), f"fdsd_{name}"), ctypes.c_void_p).value or 0


def call(name: str, params: CParams) -> None:
    """Run op `fdsd_<name>`. Raises ValueError: the kernel refused its arguments; the text names the argument."""
    error = function(name)(ctypes.byref(params))
    if error:
        raise ValueError(f"{name}: {error.decode()}")


class BoundCall:
    """One op and its params; what these point to is kept alive. Counts are written to `params` before a run."""

    def __init__(self, op: str, params: CParams, arrays: object = None) -> None:
        self._op, self._function = op, function(op)
        self.params: Any = params
        self._arrays = arrays
        self._reference = ctypes.byref(params)

    def run(self) -> None:
        """Run the op, or start it where the device runs in its own time.

        Raises ValueError: the kernel refused its arguments; the text names op and argument.
        """
        error = self._function(self._reference)
        if error:
            raise ValueError(f"{self._op}: {error.decode()}")


def isa() -> str:
    return ISA_LEVELS[library().fdsd_current_isa()]


def available_isas() -> tuple[str, ...]:
    """Return the levels this processor can run, lowest first."""
    return ISA_LEVELS[: library().fdsd_best_isa() + 1]


def set_isa(name: str) -> None:
    """Choose a level for the whole process. Raises ConfigError: unknown level, or the processor lacks it."""
    _set_isa(library(), name)


def amx_refusal() -> str | None:
    """Return why level amx cannot be used on this machine, None if it can."""
    refusal = library().fdsd_amx_refusal()
    return refusal.decode() if refusal else None


def level_text() -> str:
    """Return the level in use and, where the processor has AMX that the system keeps from us, why it is not amx."""
    refusal = amx_refusal() if isa() == "avx512" else None
    return f"{isa()} (not amx: {refusal})" if refusal is not None and refusal.startswith("the system") else isa()


def assume_tiles(tiles: Literal["chip", "twin"] | None) -> None:
    """From now on level amx means the chip's tile instructions, or their twin, whatever this machine allows; for tests.

    Args:
        tiles: "chip" on a processor without them is for a caller that executes the instructions itself. None resets
            to what the machine allows.

    Raises ConfigError: level amx is in use, or the processor has no AVX-512.
    """
    error = library().fdsd_assume_tiles((None, "chip", "twin").index(tiles))
    if error:
        raise ConfigError(error.decode())


def num_threads() -> int:
    return int(library().fdsd_num_threads())


def set_num_threads(count: int, num_processors: int | None = None) -> None:
    """Set how many threads the kernels use; not while an op runs. Their counts start anew.

    `num_processors`: how many of them the system runs at a time; None = as it says, see `processors`. Raises
    ConfigError: count is not in 1..1024, or num_processors is negative.
    """
    at_once = own_processors().at_once if num_processors is None else num_processors
    error = library().fdsd_set_num_threads(count, at_once)
    if error:
        raise ConfigError(f"{error.decode()}, got {count if at_once > 0 else at_once}")


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """What one thread of the kernels has done.

    Attributes:
        pieces, stolen: of the loops that are shared it ran; of them, taken from another thread's part.
        bytes_read: by pieces whose loop says how many: those of weights and of rows.
        moves: to the calling thread's processor, when the system had stopped it in a piece.
    """

    pieces: int
    stolen: int
    bytes_read: int
    moves: int
    sleeps: int


def thread_counts() -> tuple[int, tuple[ThreadCounts, ...]]:
    """Return how many loops were shared since the threads were started, and the counts of each, the caller's first."""
    num_jobs = ctypes.c_int64()
    fields = ((ctypes.c_int64 * len(ThreadCounts.__slots__)) * num_threads())()
    library().fdsd_thread_counts(ctypes.byref(num_jobs), ctypes.byref(fields))
    return num_jobs.value, tuple(ThreadCounts(*counts) for counts in fields)
