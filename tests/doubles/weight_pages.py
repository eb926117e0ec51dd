"""What a process maps of the memory that engines share packed weights over, as the system tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class WeightPages(NamedTuple):
    """One process's pages: which file, and sizes in kB; `own_share`: its part of pages that several processes map."""

    inodes: frozenset[int]
    resident: int
    own_share: int


def weight_pages(pid: int | str = "self") -> WeightPages:
    """Return what /proc/PID/smaps says."""
    inodes, sizes, is_weights = set[int](), {"Rss": 0, "Pss": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)", line):
            is_weights = found[2].startswith("/memfd:fdsd-weights")
            if is_weights:
                inodes.add(int(found[1]))
        elif is_weights and (found := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            sizes[found[1]] += int(found[2])
    return WeightPages(frozenset(inodes), sizes["Rss"], sizes["Pss"])
