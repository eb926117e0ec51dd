"""all_reduce and all_gather over several ranks: the bytes of the definition, and no op waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.device.communicator import Communicator, shared_segment
from fastdeploy_sd.device.program.program import Program, Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.device.tensors import from_numpy
from fastdeploy_sd.ops import collective as ops
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.reference import collective as reference
from fastdeploy_sd.types.ranges import SliceRule, halved
from tests.ops.backends import isa, threads, to_paddle
from tests.ops.rank_process import digest, values
from tests.ops.ranks import on_threads, rank_processes, shared_group

# Rows x columns: nothing, one value, odd sizes, more than the buffers of a small segment and of a large one.
SHAPES = [(0, 8), (1, 1), (3, 17), (5, 0), (7, 1030), (70, 2048)]
SMALL_SEGMENT = 4096 + 2 * 4 * 960


def same(results: list[Any], want: Any, where: str) -> None:
    for rank, got in enumerate(results):
        assert not isinstance(got, Exception), f"{where} rank {rank}: {got}"
        np.testing.assert_array_equal(got, want, err_msg=f"{where} rank {rank}")


def reduced(xs: Sequence[Any], ends: Sequence[Communicator], dtype: Any = np.uint16, **extras: Any) -> list[Any]:
    return on_threads(len(ends), lambda rank: ops.all_reduce(xs[rank], ends[rank], dtype, **extras))


def gathered(parts: Sequence[Any], ends: Sequence[Communicator], columns: int, unit: int) -> list[Any]:
    return on_threads(len(ends), lambda rank: ops.all_gather(parts[rank], ends[rank], columns, unit))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_bytes", [SMALL_SEGMENT, 1 << 21])
def test_sums_are_those_of_the_tree_on_every_rank(size: int, num_bytes: int) -> None:
    rng = np.random.default_rng(0)
    with shared_group(size, num_bytes) as ends, threads(2):
        for level in library.available_isas():
            for rows, columns in SHAPES:
                xs = [values(1, rank, rows, columns) for rank in range(size)]
                bias = rng.standard_normal(columns).astype(np.float32)
                shared = to_bf16(rng.standard_normal((rows, columns), np.float32))
                for extras in ({}, {"bias": bias}, {"shared": shared}):
                    with isa(level):
                        got = reduced(xs, ends, **extras)
                    same(
                        got, reference.all_reduce(xs, np.uint16, **extras), f"{level} {rows}x{columns} {extras.keys()}"
                    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_bytes", [SMALL_SEGMENT, 1 << 21])
def test_columns_lie_side_by_side_on_every_rank(size: int, num_bytes: int) -> None:
    with shared_group(size, num_bytes) as ends, threads(2):
        for rows, columns in SHAPES:
            for unit in (1, 64):
                whole = to_bf16(values(2, 0, rows, columns))
                for dtype in (np.uint16, np.float32):
                    wanted = whole.astype(dtype)
                    parts = [wanted[:, part.start : part.stop].copy() for part in halved(columns, size, unit)]
                    got = gathered(parts, ends, columns, unit)
                    same(got, wanted, f"{rows}x{columns} unit {unit} {dtype}")


@pytest.mark.parametrize("size", [2, 4])
def test_a_linear_over_ranks_has_the_bytes_of_one(size: int) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((70, 640), np.float32)
    bias = rng.standard_normal(70).astype(np.float32)
    x: np.ndarray = rng.standard_normal((9, 640), np.float32)
    rule = SliceRule(4, 128)
    want = linear(x, pack_linear(weight, "wint8", rule), bias, np.uint16)

    def run(rank: int) -> Any:
        part = halved(640, size, 128)[rank]
        columns = slice(part.start, part.stop)
        packed = pack_linear(weight[:, columns], "wint8", rule.of_rank(size))
        own = linear(np.ascontiguousarray(x[:, columns]), packed, None, np.float32)
        return ops.all_reduce(own, ends[rank], np.uint16, bias)

    with shared_group(size) as ends:
        same(on_threads(size, run), want, f"{size} ranks")


@pytest.mark.parametrize("size", [2, 4])
def test_recorded_passes_and_operators_exchange_too(size: int) -> None:
    """Each rank runs its pass in a thread: waiting holds neither Python's lock nor the kernels' threads."""
    rows, columns = 6, 300
    xs = [values(4, rank, rows, columns) for rank in range(size)]
    total: Any = reference.all_reduce(xs, np.float32)
    want = np.concatenate([reference.all_reduce([total] * size, np.float32)] * size, axis=1)

    def passes(x: Any, end: Communicator) -> Any:
        total = ops.all_reduce(ops.all_reduce(x, end, paddle.float32), end, paddle.float32)
        return ops.all_gather(total, end, columns * size)

    def recorded(rank: int) -> Any:
        recorder = Recorder()
        x = recorder.add_input("x", paddle.float32, (Size("num_rows"), columns))
        output = passes(x, ends[rank])
        recording = Recording(recorder, [output], {"num_rows": rows + 2})
        given = np.zeros((rows + 2, columns), np.float32)
        given[:rows] = xs[rank]
        program = Program(recording, {"x": given})
        for attempt in (1, 2):
            ends[rank].begin(attempt)
            program.run({"num_rows": rows})
        return program.outputs[0].numpy()[:rows]

    def eager(rank: int) -> Any:
        return passes(to_paddle(xs[rank]), ends[rank]).numpy()

    for body in (recorded, eager):
        with shared_group(size) as ends:
            same(on_threads(size, body), want, body.__name__)


def test_a_rank_that_fails_ends_the_others_ops_and_the_next_attempt_works() -> None:
    """Over and over: a rank that stopped at any op is in step again."""
    rng = np.random.default_rng(5)
    with shared_group(4) as ends:
        for attempt in range(1, 40):
            fails = int(rng.integers(4)), int(rng.integers(4))

            def run(rank: int, attempt: int = attempt, fails: tuple[int, int] = fails) -> list[str]:
                ends[rank].begin(attempt)
                found = []
                for op in range(4):
                    if attempt % 2 and (rank, op) == fails:
                        ends[rank].fail()
                    found.append(digest(ops.all_reduce(values(op, rank, 3, 40), ends[rank], np.float32)))
                return found

            results = on_threads(4, run)
            if attempt % 2 == 0:
                want = [
                    digest(reference.all_reduce([values(op, r, 3, 40) for r in range(4)], np.float32))
                    for op in range(4)
                ]
                assert results == [want] * 4
            else:
                texts = {str(result) for result in results}
                assert texts == {f"all_reduce: rank {fails[0]} has failed"}, fails


def test_a_quick_rank_may_begin_the_next_attempt_while_a_slow_one_ends_the_last() -> None:
    """What it gave in its last op stays readable until all have begun."""
    want = [digest(reference.all_reduce([values(n, r, 2, 40) for r in range(4)], np.float32)) for n in range(1, 201)]

    def run(rank: int) -> list[str]:
        found = []
        for attempt in range(1, 201):
            ends[rank].begin(attempt)
            found.append(digest(ops.all_reduce(values(attempt, rank, 2, 40), ends[rank], np.float32)))
        return found

    with shared_group(4) as ends:
        assert on_threads(4, run) == [want] * 4


def test_ranks_at_different_ops_say_so() -> None:
    with shared_group(2) as ends:
        results = on_threads(2, lambda rank: ops.all_reduce(values(0, rank, 1 + rank, 8), ends[rank], np.float32))
        assert {type(result) for result in results} == {ValueError}
        assert "exchanges another number of bytes: expected the same ops on all ranks" in str(results)
        for end in ends:
            end.begin(5)
        with pytest.raises(ValueError, match="attempt: expected a higher number than before"):
            ends[0].begin(5)
        ends[1].begin(6)
        with pytest.raises(ValueError, match="all_reduce: rank 1 has begun another attempt"):
            ops.all_reduce(values(0, 0, 1, 8), ends[0], np.float32)


def test_an_abort_is_for_ever() -> None:
    with shared_group(2) as ends:
        results = on_threads(
            2,
            lambda rank: ends[1].abort() if rank else ops.all_reduce(values(0, 0, 1, 8), ends[0], np.float32),
        )
        assert str(results[0]) == "all_reduce: the ranks' group was aborted"
        for end in ends:
            end.begin(7)
            with pytest.raises(ValueError, match="the ranks' group was aborted"):
                ops.all_reduce(values(0, 0, 1, 8), end, np.float32)


def test_what_is_no_group_is_refused() -> None:
    fd = shared_segment(8192)
    small = shared_segment(4096 + 4 * 63)
    try:
        for given, text in (((fd, 0, 3), "size: expected 2 or 4"), ((fd, 2, 2), "rank: expected one of the group's")):
            with pytest.raises(ValueError, match=text):
                Communicator.shared(*given)
        with pytest.raises(ValueError, match="file: expected a segment of at least"):
            Communicator.shared(small, 0, 2)
        with pytest.raises(ValueError, match="file: expected the descriptor of a segment"):
            Communicator.shared(1 << 20, 0, 2)
        end = Communicator.shared(fd, 0, 2, 0.1)
        with pytest.raises(ValueError, match="size: expected the segment's number of ranks"):
            Communicator.shared(fd, 0, 4)
        with pytest.raises(ValueError, match="all_gather: x: expected the columns of the rank's range"):
            ops.all_gather(values(0, 0, 2, 5), end, 8)
        with pytest.raises(ValueError, match="all_reduce: rank 1 did not come in time"):
            ops.all_reduce(values(0, 0, 1, 8), end, np.float32)
        end.close()
        with pytest.raises(ValueError, match="communicator: expected 0 or an open one"):
            ops.all_reduce(values(0, 0, 1, 8), end, np.float32)
    finally:
        os.close(fd)
        os.close(small)


class Meeting:
    """What two nodes that are threads carry their bytes with."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self._slots: dict[int, bytes] = {}

    def swap(self, node: int, data: bytes) -> bytes:
        self._slots[node] = data
        self.barrier.wait()
        both = self._slots[0] + self._slots[1]
        self.barrier.wait()
        return both


class NodeEnd:
    """One node's end of a meeting, and what it was told."""

    def __init__(self, meeting: Meeting, node: int) -> None:
        self._meeting, self._node = meeting, node
        self.told: list[object] = []

    def exchange(self, data: bytes) -> bytes:
        return self._meeting.swap(self._node, data)

    def begin(self, attempt: int) -> None:
        self.told.append(attempt)

    def fail(self) -> None:
        self.told.append("fail")

    def abort(self) -> None:
        self.told.append("abort")


def test_something_else_may_carry_the_bytes() -> None:
    """As between hosts; what it raises is told and fails the op."""
    meeting, errors = Meeting(), list[Exception]()
    nodes = [NodeEnd(meeting, node) for node in range(2)]
    ends = [Communicator.over(nodes[rank], rank, 2, errors.append) for rank in range(2)]
    try:
        for rows, columns in [*SHAPES, (3, 200_000)]:
            xs = [values(6, rank, rows, columns) for rank in range(2)]
            got = reduced(xs, ends, np.float32)
            same(got, reference.all_reduce(xs, np.float32), f"{rows}x{columns}")
        assert not errors
        meeting.barrier.abort()
        with pytest.raises(ValueError, match="all_reduce: the exchange with the other ranks failed"):
            ops.all_reduce(values(0, 0, 1, 8), ends[0], np.float32)
        assert isinstance(errors[0], threading.BrokenBarrierError)
        ends[0].begin(1)
        ends[0].fail()
        with pytest.raises(ValueError, match="all_reduce: rank 0 has failed"):
            ops.all_reduce(values(0, 0, 1, 8), ends[0], np.float32)
        ends[0].abort()
        assert nodes[0].told == [1, "fail", "abort"]
    finally:
        for end in ends:
            end.close()


def test_two_nodes_of_two_ranks_get_the_sums_of_four() -> None:
    """Ranks of a node share memory, and the first of each exchanges for its node."""
    meeting, errors = Meeting(), list[Exception]()
    for num_bytes in (SMALL_SEGMENT, 1 << 21):
        with shared_group(2, num_bytes) as first, shared_group(2, num_bytes) as second:
            local, nodes = [*first, *second], [NodeEnd(meeting, 0), None, NodeEnd(meeting, 1), None]
            ends = [Communicator.over(nodes[r], r, 4, errors.append, local[r]) for r in range(4)]
            for end in ends:
                end.begin(1)
            for rows, columns in SHAPES:
                xs = [values(9, rank, rows, columns) for rank in range(4)]
                same(reduced(xs, ends, np.float32), reference.all_reduce(xs, np.float32), f"{rows}x{columns}")
            columns, unit = 5 * 64 + 7, 64
            x = values(3, 0, 9, columns)
            parts = [x[:, part.start : part.stop].copy() for part in halved(columns, 4, unit)]
            same(gathered(parts, ends, columns, unit), x, "gathered")
            assert not errors
            # A rank that fails on one node costs all of its node at once, the one that waits for the node too.
            ends[3].fail()
            with pytest.raises(ValueError, match="all_reduce: rank 1 has failed"):
                ops.all_reduce(values(0, 0, 1, 8), ends[2], np.float32)
            for end in ends:
                end.close()


def test_what_a_communicator_of_nodes_must_be_made_of() -> None:
    some = NodeEnd(Meeting(), 0)
    with shared_group(2, SMALL_SEGMENT) as ends, shared_group(4, SMALL_SEGMENT) as four:
        for exchange, rank, local, text in [
            (some, 1, ends[1], "exchange: expected one on the first rank of a node"),
            (None, 2, ends[0], "exchange: expected one on the first rank of a node"),
            (some, 2, ends[1], "local: expected this rank's place in its node"),
            (some, 0, four[0], "local: expected equally many ranks on two nodes or more"),
        ]:
            with pytest.raises(ValueError, match=text):
                Communicator.over(exchange, rank, 4, lambda error: None, local)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_get_the_same_bytes_also_on_one_core(size: int) -> None:
    with rank_processes(size) as ranks:
        for seed, (rows, columns) in enumerate(SHAPES):
            for rank in ranks:
                rank.send("reduce", seed=seed, rows=rows, columns=columns)
            want = reference.all_reduce([values(seed, r, rows, columns) for r in range(size)], np.float32)
            assert [rank.reply() for rank in ranks] == [digest(want)] * size
        core = min(os.sched_getaffinity(0))
        for rank in ranks:
            rank.ask("pin", cores=[core])
            rank.send("reduce", seed=0, rows=1, columns=64, times=500)
        assert len({rank.reply() for rank in ranks}) == 1


@pytest.mark.slow
def test_a_stopped_rank_costs_the_attempt_and_a_killed_one_too() -> None:
    with rank_processes(2, timeout_s=0.3) as ranks:
        for rank in ranks:
            rank.ask("begin", attempt=1)
        os.kill(ranks[1].process.pid, signal.SIGSTOP)
        assert ranks[0].ask("reduce", seed=0, rows=1, columns=64) == "error: all_reduce: rank 1 did not come in time"
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        # What came late finds the attempt failed, and goes no further.
        late = ranks[1].ask("reduce", seed=0, rows=1, columns=64)
        assert late == "error: all_reduce: rank 0 has failed"
        for attempt in range(2, 100):
            for rank in ranks:
                rank.ask("begin", attempt=attempt)
            for rank in ranks:
                rank.send("reduce", seed=0, rows=1, columns=64)
            first, second = (rank.reply() for rank in ranks)
            if not any(found.endswith(" in time") for found in (first, second)):  # on a busy machine one may be late
                break
        assert first == second
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        assert ranks[0].ask("reduce", seed=0, rows=1, columns=64) == "error: all_reduce: rank 1 did not come in time"


@pytest.mark.slow
def test_ranks_that_wait_hear_of_a_failure_and_of_an_abort() -> None:
    """Long before their deadline."""
    with rank_processes(4) as ranks:
        begin = time.monotonic()
        for attempt, order in ((1, "fail"), (2, "abort")):
            for rank in ranks:
                rank.ask("begin", attempt=attempt)
            for rank in ranks[1:]:
                rank.send("reduce", seed=0, rows=1, columns=64)
            ranks[0].ask(order)
            texts = {rank.reply() for rank in ranks[1:]}
            assert texts == {
                {
                    "fail": "error: all_reduce: rank 0 has failed",
                    "abort": "error: all_reduce: the ranks' group was aborted",
                }[order]
            }
        assert time.monotonic() - begin < 100


def test_operators_take_tensors() -> None:
    x = values(0, 0, 3, 20)
    got = ops.all_reduce(from_numpy(x), None, paddle.bfloat16)
    np.testing.assert_array_equal(got.numpy(), to_bf16(x))
