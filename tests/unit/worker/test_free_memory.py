"""What /proc and /sys say of free memory, on files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_sd.worker.loading.free_memory import free_memory

MIB = 1 << 20
MEMINFO = "MemTotal:       8192 kB\nMemFree:        1024 kB\nMemAvailable:   6144 kB\nHugePages_Total:       0\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, usage: int, cached: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    stat = f"anon 1\nfile {2 * cached}\ninactive_file {cached}\n"
    return {f"{at}memory.max": f"{limit}\n", f"{at}memory.current": f"{usage}\n", f"{at}memory.stat": stat}


def legacy(folder: str, limit: int, usage: int, cached: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{at}memory.limit_in_bytes": f"{limit}\n",
        f"{at}memory.usage_in_bytes": f"{usage}\n",
        f"{at}memory.stat": f"cache 5\ntotal_inactive_file {cached}\n",
    }


UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 6 * MIB),
        ({"proc/self/cgroup": "0::/\n"}, 6 * MIB),
        ({"proc/self/cgroup": "0::/a/b\n", **group("a/b/", "max", 9), **group("a/", "max", 9)}, 6 * MIB),
        ({"proc/self/cgroup": "0::/a/b\n", **group("a/b/", f"{5 * MIB}", 3 * MIB, MIB)}, 3 * MIB),
        # An outer group may be the tighter one.
        (
            {"proc/self/cgroup": "0::/a/b\n", **group("a/b/", f"{5 * MIB}", MIB), **group("a/", f"{5 * MIB}", 4 * MIB)},
            MIB,
        ),
        # A container sees its own group at the mount's root, but its name from outside.
        ({"proc/self/cgroup": "0::/../docker/x\n", **group("", f"{4 * MIB}", 2 * MIB)}, 2 * MIB),
        ({"proc/self/cgroup": "5:memory:/docker/x\n0::/\n", **legacy("", 4 * MIB, 2 * MIB, MIB)}, 3 * MIB),
        (
            {"proc/self/cgroup": "5:cpu,memory:/x\n", **legacy("x/", 4 * MIB, MIB), **legacy("", UNLIMITED, MIB)},
            3 * MIB,
        ),
        ({"proc/self/cgroup": "0::/\n", **group("", f"{MIB}", 2 * MIB)}, 0),
    ],
)
def test_the_tightest_limit_counts(files: dict[str, str], free: int, tmp_path: Path) -> None:
    assert free_memory(write(tmp_path, files)) == free


def test_on_this_machine_it_is_a_number() -> None:
    assert free_memory() > 0
