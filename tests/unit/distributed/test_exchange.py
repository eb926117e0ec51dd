"""What carries sums between nodes: the bytes of each on all of them, and no wait without an end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

from fastdeploy_sd.distributed.exchange import ExchangeError, FirstExchange, OtherExchange
from fastdeploy_sd.wire.sockets import CurveKeys
from tests.doubles.ports import free_port

pytestmark = pytest.mark.slow

T = TypeVar("T")

KEYS = CurveKeys.of(b"s" * 32, b"c" * 32)
GROUP = "a group"
WAIT_S = 60.0


def together(*works: Callable[[], T]) -> list[T | Exception]:
    """What each returned or raised; all run at the same time."""

    def run(work: Callable[[], T]) -> T | Exception:
        try:
            return work()
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


@contextlib.contextmanager
def connected(num_nodes: int, timeout_s: float = WAIT_S) -> Iterator[list[FirstExchange | OtherExchange]]:
    """The ends of all nodes."""
    port = free_port()
    with contextlib.ExitStack() as opened:
        first = FirstExchange(KEYS, "127.0.0.1", port, GROUP, num_nodes, WAIT_S)
        opened.callback(first.close)
        others = [OtherExchange(KEYS, f"tcp://127.0.0.1:{port}", GROUP, node, WAIT_S) for node in range(1, num_nodes)]
        for other in others:
            opened.callback(other.close)
        assert together(first.wait_connected, *(other.connect for other in others)) == [None] * num_nodes
        ends: list[FirstExchange | OtherExchange] = [first, *others]
        for end in ends:
            end._timeout_s = timeout_s
            end.begin(1)
        yield ends


def texts(results: list[bytes | Exception]) -> list[str]:
    return [str(result) for result in results]


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_everybody_gets_the_bytes_of_all_in_order(num_nodes: int) -> None:
    with connected(num_nodes) as ends:
        for number in range(20):
            size = 1 << number
            given = [bytes([number, node]) * size for node in range(num_nodes)]
            got = together(*(partial(end.exchange, data) for end, data in zip(ends, given, strict=True)))
            assert got == [b"".join(given)] * num_nodes


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failure_on_one_node_ends_the_attempt_on_all_and_the_next_one_works(failing: int) -> None:
    with connected(4) as ends:

        def attempt(node: int) -> bytes:
            try:
                if node == failing:
                    raise ExchangeError("its part broke")
                return ends[node].exchange(b"lost")
            except ExchangeError:
                ends[node].fail()  # as an op's failure does
                raise

        got = together(*(partial(attempt, node) for node in range(4)))
        errors = texts(got)
        assert errors.pop(failing) == "its part broke"
        assert all(error.endswith("has failed") for error in errors)
        assert errors[0] == f"node {failing} has failed"
        for end in ends:
            end.begin(2)
        given = [bytes([node]) * 5 for node in range(4)]
        assert (
            together(*(partial(end.exchange, data) for end, data in zip(ends, given, strict=True)))
            == [b"".join(given)] * 4
        )


@pytest.mark.parametrize("waiting", [0, 1])
def test_an_abort_wakes_who_waits(waiting: int) -> None:
    with connected(2) as ends:
        timer = threading.Timer(0.1, ends[waiting].abort)
        timer.start()
        with pytest.raises(ExchangeError, match="the ranks' group was aborted"):
            ends[waiting].exchange(b"no answer")
        timer.join()


@pytest.mark.parametrize(("waiting", "missing"), [(0, "node 1, node 2, node 3"), (1, "node 0")])
def test_nobody_waits_for_ever(waiting: int, missing: str) -> None:
    with (
        connected(4, timeout_s=0.3) as ends,
        pytest.raises(ExchangeError, match=f"^{missing} did not come in time$"),
    ):
        ends[waiting].exchange(b"no answer")


def test_the_end_of_a_connection_is_noticed() -> None:
    with connected(2) as ends, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[1].exchange, b"no answer")
        ends[0]._hub.close()
        assert isinstance(waiting.exception(WAIT_S), ExchangeError)
        assert "node 0: " in str(waiting.exception())


def test_who_names_another_group_is_not_taken_for_a_node() -> None:
    """A node of a server that has ended may still be there."""
    port = free_port()
    with (
        contextlib.closing(FirstExchange(KEYS, "127.0.0.1", port, GROUP, 2, 1.0)) as first,
        contextlib.closing(OtherExchange(KEYS, f"tcp://127.0.0.1:{port}", "another", 1, 1.0)) as other,
    ):
        begin = time.monotonic()
        got = together(first.wait_connected, other.connect)
        assert str(got[0]) == "the connection of node 1 did not come in time"
        assert "an answer of node 0" in str(got[1])
        assert time.monotonic() - begin < WAIT_S
