"""Experts that ranks with a GPU each share: the bits of moe_ffn on one GPU, or an error that names a rank.

Each rank is a process with its own memory, of which the others see what it shares.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from custom_ops import cuda_build
from fastdeploy_sd.device.expert_service import ExpertService, expert_segment
from fastdeploy_sd.types import F32
from tests.ops import gpu_expert_process
from tests.ops.cuda_device import emulated
from tests.ops.expert_model import Layer, in_one_process, linear_placement, shape_of
from tests.ops.rank_process import digest
from tests.ops.ranks import TIMEOUT_S, RankProcess

pytestmark = pytest.mark.slow


class Group:
    """Ranks over one segment, which can be started again."""

    def __init__(self, fd: int, size: int, timeout_s: float) -> None:
        self.fd, self._size, self._timeout_s = fd, size, timeout_s
        self.ranks = [self._started(rank) for rank in range(size)]

    def _started(self, rank: int) -> RankProcess:
        return RankProcess(self.fd, rank, self._size, self._timeout_s, "gpu_expert_process")

    def start_again(self, rank: int) -> None:
        self.ranks[rank].end()
        self.ranks[rank] = self._started(rank)

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


@contextlib.contextmanager
def group_of(size: int, timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
        patch.setenv("FDSD_EMULATED_GPUS", str(size))
        fd = expert_segment()
        stack.callback(os.close, fd)
        group = Group(fd, size, timeout_s)
        stack.callback(group.end)
        assert [rank.reply() for rank in group.ranks] == [1] * size
        assert [rank.ask("meet") for rank in group.ranks] == [None] * size
        yield group


def on_one_gpu(layer: Layer, x: F32) -> F32:
    with emulated().runs_ops():
        return in_one_process(layer, x)


def want(seed: int, count: int, times: int) -> str:
    found = []
    for p in range(times):
        x = gpu_expert_process.tokens(seed + p, count)
        for layer in gpu_expert_process.layers():
            x = on_one_gpu(layer, x)
        found.append(x)
    return digest(np.concatenate(found))


def test_ranks_get_the_bits_of_one_gpu() -> None:
    """Each has its own tokens: none, one, more than a job has; at once, and while the others have no work."""
    orders = [{"seed": 100 * r, "count": count, "times": 3} for r, count in enumerate((9, 1, 0))]
    expected = [want(**order) for order in orders]
    with group_of(3) as group:
        for rank, order in zip(group.ranks, orders, strict=True):
            rank.send("run", **order)
        assert [rank.reply() for rank in group.ranks] == expected
        assert group.ranks[2].ask("run", **orders[0]) == expected[0]
        counts = np.array(group.ranks[1].ask("counts"))
        assert counts.sum(axis=1).tolist() == [3 * 3 * (9 + 1 + 9)] * 2
        assert group.ranks[0].ask("close") is None


def test_ranks_that_share_tokens_out_have_a_part_of_the_rows_each() -> None:
    x = gpu_expert_process.tokens(5, 7)
    y = on_one_gpu(gpu_expert_process.layers()[0], x)
    with group_of(2) as group:
        for i, rank in enumerate(group.ranks):
            rank.send("run", seed=5, count=7, times=1, parts=(i, 2))
        first, second = (
            np.frombuffer(bytes.fromhex(rank.reply()), np.float32).reshape(x.shape) for rank in group.ranks
        )
    np.testing.assert_array_equal((first + second).view(np.uint32), y.view(np.uint32))
    assert (np.signbit(first[3:]) & (first[3:] == 0)).all()


def test_a_rank_that_is_killed_and_starts_again_costs_no_bit() -> None:
    """The others wait for it, also for longer than the timeout while it loads."""
    order = {"seed": 5, "count": 6, "times": 2}
    expected = want(**order)
    with group_of(2, timeout_s=4.0) as group:
        for is_asked_first in (True, False):
            if is_asked_first:
                group.ranks[1].send("run", **order)
                group.ranks[0].send("run", **order)
                time.sleep(0.05)
            group.ranks[1].end()
            if not is_asked_first:
                group.ranks[0].send("run", **order)
            with loading(group) as service:
                if not is_asked_first:
                    leave_slot(service)
                group.start_again(1)
            assert group.ranks[0].reply() == expected
            assert group.ranks[1].reply() > 1  # its incarnation
            assert group.ranks[1].ask("run", **order) == expected


@contextlib.contextmanager
def loading(group: Group) -> Iterator[ExpertService]:
    """Open rank 1, which was killed, in this process; it does not serve."""
    layers = gpu_expert_process.layers()
    placement = linear_placement(gpu_expert_process.NUM_EXPERTS, len(group.ranks))
    shape = shape_of(layers, placement, gpu_expert_process.MAX_TOKENS)
    with contextlib.closing(ExpertService.open(group.fd, 1, shape, 1.0)) as service:
        for i, layer in enumerate(layers):
            layer.register(service, i, placement[1], np.float32)
        yield service


def leave_slot(service: ExpertService) -> None:
    """Have an expert leave rank 1 after it was asked for: a job may ask for it until it is done."""
    while not service.awaited()[0, 1]:
        time.sleep(0.001)
    assert not service.wait_older_jobs(service.retire(0, 0), 0.1)


def test_a_rank_that_does_not_come_is_named_and_its_pass_only_is_lost() -> None:
    order = {"seed": 5, "count": 3, "times": 1}
    expected = want(**order)
    with group_of(2, timeout_s=0.4) as group:
        first, second = group.ranks
        os.kill(second.process.pid, signal.SIGSTOP)
        assert first.ask("run", **order) == "error: rank 1 did not run its experts in time"
        assert first.ask("lost") is True
        os.kill(second.process.pid, signal.SIGCONT)
        assert first.ask_in_time("run", **order) == expected
        assert first.ask("lost") is False
        second.end()
        assert first.ask("run", **order) == "error: rank 1 did not run its experts in time"
        with loading(group) as service:
            service.begin_drain(range(1))
            assert first.ask("run", **order) == "error: rank 1 did not run its experts in time"
        first.ask("gone", rank=1)
        assert first.ask("run", **order) == "error: rank 1 has ended, and no other has its experts"
        group.start_again(1)
        assert group.ranks[1].reply() == 3
        assert first.ask_in_time("run", **order) == expected
        first.ask("abort")
        assert first.ask("run", **order) == "error: the expert service was aborted"
