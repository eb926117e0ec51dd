"""What counts as a sign of life of another process."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fastdeploy_sd.process.liveness import LivenessClock, LivenessProbe, WorkClock


@pytest.mark.slow
def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            other.send_signal(signal.SIGSTOP)  # what it does to start, and reads from a disk for it, is work
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            signs = LivenessClock(other.pid, pause_s=0.05)
            time.sleep(1)  # as if suspended: no check ran
            signs.probe()
            assert 0 < signs.age_s <= 0.1
            signs.note()
            assert signs.age_s == 0
        finally:
            other.kill()


@pytest.mark.slow
async def test_a_process_that_may_wait_for_another_is_not_silent() -> None:
    silent, may_wait = list[float](), [True]

    async def ask() -> None:
        await asyncio.sleep(60)

    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
            probe = LivenessProbe(other.pid, ask, 0.2, silent.append, lambda: may_wait[0])
            await asyncio.sleep(1)
            assert not silent
            may_wait[0] = False
            async with asyncio.timeout(60):
                while not silent:
                    await asyncio.sleep(0.05)
            await probe.stop()
        finally:
            other.kill()


@pytest.mark.slow
def test_reading_memory_from_a_disk_is_work(tmp_path: Path) -> None:
    """It takes next to no time on a processor, as when weights are mapped from a file for the first time."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        signs = LivenessClock(os.getpid(), pause_s=1000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        assert mapped[1 << 19] == 0
        if resource.getrusage(resource.RUSAGE_SELF).ru_majflt == before:
            pytest.skip("this file system keeps all files in memory")
        time.sleep(1)  # long enough for the little that was computed here to be no work
        signs.probe()
        assert signs.age_s == 0


def test_work_is_a_share_of_the_time_and_a_suspension_counts_for_two_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = cpu_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = WorkClock(lambda: cpu_s, share=0.05, pause_s=1.0)
    now, cpu_s = now + 1.0, cpu_s + 0.04
    assert clock.probe() == (1.0, False)
    now, cpu_s = now + 1.0, cpu_s + 0.06
    assert clock.probe() == (1.0, True)
    now += 1000.0
    assert clock.probe() == (2.0, False)
