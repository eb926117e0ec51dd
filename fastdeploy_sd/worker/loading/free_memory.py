"""The memory that this process may still take: limits of the system and of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """The mount point of a hierarchy of control groups, and the names of its files and of its file cache's entry."""

    mount: str
    limit: str
    usage: str
    file_cache: str


_UNIFIED = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_LEGACY = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken before the system swaps or a control group's limit ends this process.

    Reclaimable pages of files count as free, in the system and in the groups. `root`: of the file system with /proc and
    /sys.

    Raises OSError: /proc/meminfo cannot be read.
    """
    meminfo = _entries((root / "proc/meminfo").read_text(encoding="ascii").replace(":", ""))
    return max(0, min([meminfo["MemAvailable"] * 1024, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    for files, group in _groups(root):
        mount = root / files.mount
        # A container sees its own group as the mount's root, under any name that the kernel reports.
        for folder in (mount / group, *(mount / group).parents):
            if folder.is_relative_to(mount):
                yield from _left_by_group(folder, files)


def _groups(root: Path) -> Iterator[tuple[_Files, str]]:
    """Yield the groups of this process that may limit memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            yield _LEGACY, group.lstrip("/")
        elif number == "0":
            yield _UNIFIED, group.lstrip("/")


def _left_by_group(folder: Path, files: _Files) -> Iterator[int]:
    """Yield the bytes left below the group's limit; nothing where it has no limit or is not visible."""
    try:
        limit = (folder / files.limit).read_text(encoding="ascii").strip()
        if limit == "max":
            return
        usage = int((folder / files.usage).read_text(encoding="ascii"))
        cached = _entries((folder / "memory.stat").read_text(encoding="ascii")).get(files.file_cache, 0)
    except OSError:
        return
    yield int(limit) - usage + cached


def _entries(text: str) -> dict[str, int]:
    """Parse lines of a name and a number, with or without a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines()) if len(words) > 1}
