"""How many threads a machine is worth, from trees of the files that Linux shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from fastdeploy_sd.device.processors import Processors, own_processors, read_processors

V2 = {
    "proc/self/cgroup": "0::/pod/server\n",
    "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/m\n3:cpuset:/\n2:cpu,cpuacct:/docker/abc\n0::/\n",
    "proc/self/mountinfo": (
        "30 23 0:26 / / rw - ext4 /dev/vda rw\n"
        "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 31 0:30 /docker/abc /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpuacct,cpu\n"
    ),
}


def siblings(*cores: str) -> dict[str, str]:
    """The topology of processors, those of a core as Linux lists them."""
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {path.format(cpu): f"{core}\n" for core in cores for cpu in _numbers(core)}


def _numbers(core: str) -> list[int]:
    ends = [int(word) for word in core.replace("-", ",").split(",")]
    return list(range(ends[0], ends[1] + 1)) if "-" in core else ends


def read(root: Path, files: Mapping[str, str], allowed: set[int]) -> Processors:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_processors(root, allowed)


def test_hyperthreads_of_a_core_count_once(tmp_path: Path) -> None:
    found = read(tmp_path, siblings("0,4", "1,5", "2,6", "3,7"), set(range(8)))
    assert (found.num_cores, found.num_threads, found.at_once, found.quota) == (4, 4, 8, None)
    assert read_processors(tmp_path, {0, 4, 5}).num_threads == 2
    assert read_processors(tmp_path, {5}).num_threads == 1


def test_a_system_that_says_nothing_has_a_core_per_processor(tmp_path: Path) -> None:
    assert read(tmp_path, {}, {1, 3, 8}) == Processors((1, 3, 8), 3, None, ())


@pytest.mark.parametrize(
    ("quota", "threads", "at_once"),
    [("max 100000", 8, 8), ("250000 100000", 2, 3), ("50000 100000", 1, 1), ("1600000 100000", 8, 8), ("odd", 8, 8)],
)
def test_a_quota_of_version_2(tmp_path: Path, quota: str, threads: int, at_once: int) -> None:
    found = read(tmp_path, V2 | {"sys/fs/cgroup/pod/server/cpu.max": quota}, set(range(8)))
    assert (found.num_threads, found.at_once) == (threads, at_once)


def test_the_least_quota_of_a_group_and_those_around_it(tmp_path: Path) -> None:
    files = V2 | {"sys/fs/cgroup/pod/cpu.max": "300000 100000", "sys/fs/cgroup/pod/server/cpu.max": "500000 100000"}
    assert read(tmp_path, files, set(range(8))).num_threads == 3


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("400000", 4), ("150000", 1)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, threads: int) -> None:
    """The mount shows the group itself, as in a container without a name space of its own."""
    folder = "sys/fs/cgroup/cpu"
    files = V1 | {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    assert read(tmp_path, files, set(range(8))).num_threads == threads


def test_a_group_outside_of_the_mount_is_the_mounts_own(tmp_path: Path) -> None:
    files = V2 | {"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "200000 100000"}
    assert read(tmp_path, files, set(range(8))).num_threads == 2


def test_the_nodes_of_memory_that_the_processors_belong_to(tmp_path: Path) -> None:
    nodes = {f"sys/devices/system/node/node{n}/cpulist": text for n, text in {0: "0-3,8", 1: "4-7", 10: "9"}.items()}
    assert read(tmp_path, nodes, {2, 4, 8, 9}).nodes == (0, 1, 10)
    assert "memory nodes 0, 1, 10, " in (read_processors(tmp_path, {2, 4, 9}).warning or "")
    assert read_processors(tmp_path, {8}).nodes == (0,)
    assert read_processors(tmp_path, {8}).warning is None
    assert "memory nodes 0, 1" in read_processors(tmp_path, {2, 4}).describe()


def test_those_of_this_process() -> None:
    own = own_processors()
    assert set(own.allowed) == os.sched_getaffinity(0)
    assert 1 <= own.num_threads <= own.num_cores <= len(own.allowed)
    assert own.describe().startswith(f"{len(own.allowed)} usable on {own.num_cores} cores, ")
