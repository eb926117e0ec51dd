"""Which processors this process may use, how much of them, and how many threads that is worth. Knows Linux's files."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

_CPU = Path("sys/devices/system/cpu")
_NODE = Path("sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Core:
    """A core, with those of its processors that may be used.

    Attributes:
        node: of memory; None = not known.
    """

    processors: tuple[int, ...]
    node: int | None


@dataclass(frozen=True, slots=True)
class Processors:
    """What the system gives this process.

    Attributes:
        allowed: by affinity and control group, as the system numbers them.
        num_cores: among them; hyperthreads of one core count once.
        quota: of the control group, in processors' time; None = no bound.
        nodes: of memory that they belong to; empty = not known.
    """

    allowed: tuple[int, ...]
    num_cores: int
    quota: float | None
    nodes: tuple[int, ...]

    @property
    def num_threads(self) -> int:
        """How many threads of the kernels are worth starting.

        One per core: they wait for memory and share their core's vector units, so a second one per core takes time from
        the rest of the server and gains little. Whole processors of the quota: what runs beyond it is stopped, spinning
        threads included, for the rest of a period of 100 ms. At least 1.
        """
        return max(1, self.num_cores if self.quota is None else min(self.num_cores, math.floor(self.quota)))

    @property
    def at_once(self) -> int:
        """How many threads the system runs at a time."""
        count = len(self.allowed)
        return count if self.quota is None else max(1, min(count, math.ceil(self.quota)))

    @property
    def warning(self) -> str | None:
        """What an operator should change, in words; None = nothing."""
        if len(self.nodes) <= 1:
            return None
        nodes = ", ".join(map(str, self.nodes))
        return (
            f"threads may run on memory nodes {nodes}, and read slowly what another node's memory holds: give each"
            " server one node (numactl --cpunodebind=N --membind=N, a cpuset), or start one rank per node"
        )

    def with_quota_among(self, count: int) -> Processors:
        """Return the same with an equal part of the quota, for one of so many processes."""
        return self if self.quota is None else replace(self, quota=self.quota / count)

    def describe(self) -> str:
        """Return them in words, for logs and bug reports."""
        quota = "no quota" if self.quota is None else f"a quota of {self.quota:g}"
        nodes = f", memory nodes {', '.join(map(str, self.nodes))}" if len(self.nodes) > 1 else ""
        return f"{len(self.allowed)} usable on {self.num_cores} cores, {quota}{nodes}"


# How many engines a control group's quota is for; see engine_cores.take_share.
_quota_shares = [1]


@functools.cache
def own_processors() -> Processors:
    """Return those of this process, as they were at the first call."""
    return read_processors(Path("/"), os.sched_getaffinity(0)).with_quota_among(_quota_shares[0])


def share_quota(count: int) -> None:
    """Have this process take 1 / count of the quota; called before anything asks for `own_processors`."""
    _quota_shares[0] = count


def read_processors(root: Path, allowed: Collection[int]) -> Processors:
    """Return what the files of a system say; what is missing or cannot be read is taken for unbounded or unknown."""
    cores = read_cores(root, allowed)
    nodes = {core.node for core in cores if core.node is not None}
    return Processors(tuple(sorted(allowed)), len(cores), min(_quotas(root), default=None), tuple(sorted(nodes)))


def read_cores(root: Path, allowed: Collection[int]) -> list[Core]:
    """Return the cores of the processors that may be used; one whose core the system does not say is its own."""
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (root / _NODE).glob("node[0-9]*")
        for cpu in read_numbers(_text(folder / "cpulist") or "")
    }
    cores: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        cores.setdefault(_text(root / _CPU / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu), []).append(cpu)
    return [Core(tuple(processors), node_of.get(processors[0])) for processors in cores.values()]


def first_processor(root: Path = Path("/")) -> Mapping[str, str]:
    """Return the first processor's entries of /proc/cpuinfo, empty where there is none."""
    pairs = (line.partition(":") for line in (_text(root / "proc/cpuinfo") or "").split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor_name() -> str:
    """Return what the first processor is called, "unknown" where the system does not say."""
    return first_processor().get("model name", "unknown")


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas that hold for this process: of its control group and of those around it."""
    paths = {}  # controllers -> the group's path; version 2 has none
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = PurePosixPath(path)
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, kind = line.partition(" - ")
        kind_words, mount_words = kind.split(), mount.split()
        if not kind_words or not kind_words[0].startswith("cgroup"):
            continue
        is_second = kind_words[0] == "cgroup2"
        options = kind_words[-1].split(",")
        if not is_second and "cpu" not in options:
            continue
        own = next((p for names, p in paths.items() if (not names if is_second else "cpu" in names.split(","))), None)
        if own is None:
            continue
        top, folder = PurePosixPath(mount_words[3]), root / mount_words[4].lstrip("/")
        inside = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        for group in (inside, *inside.parents):
            quota = _quota(folder / group, is_second)
            if quota is not None:
                yield quota


def _quota(group: Path, is_second: bool) -> float | None:
    """Return a group's own quota in processors; None = it has none."""
    if is_second:
        text = _text(group / "cpu.max") or ""
    else:
        text = " ".join(_text(group / f"cpu.cfs_{name}_us") or "-" for name in ("quota", "period"))
    match = re.fullmatch(r"(\d+) 0*([1-9]\d*)", text)
    return None if match is None else int(match[1]) / int(match[2])


def read_numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def describe_numbers(numbers: Collection[int]) -> str:
    """Return the numbers as such a list, with commas and ranges."""
    ordered = sorted(numbers)
    first = [number for number in ordered if number - 1 not in numbers]
    last = [number for number in ordered if number + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
