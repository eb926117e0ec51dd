"""Experts that ranks of several hosts share: the bytes of one process, and what a lost connection costs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.expert_mirror import MAGIC, ExpertMirror
from fastdeploy_sd.device.expert_service import ExpertService, expert_segment
from tests.ops.backends import threads
from tests.ops.cases.experts import run_layer
from tests.ops.expert_hosts import hosts_of
from tests.ops.expert_model import Layer, Placement, Ranks, in_one_process, linear_placement, random_layer
from tests.ops.ranks import on_threads
from tests.ops.test_experts import bits, on_ranks, tokens


@pytest.mark.parametrize(
    ("num_hosts", "num_ranks", "dtype"), [(2, 2, np.uint16), (2, 4, np.float32), (3, 3, np.uint16)]
)
def test_hosts_get_the_bytes_of_one_process(num_hosts: int, num_ranks: int, dtype: Any) -> None:
    """Each rank has passes of its own sizes: none, as many tokens as fit, several rounds of them."""
    layers = [random_layer(30 + i, (7, 40, 24), top_k=3) for i in range(2)]
    xs = [[tokens(10 * r + p, (0, 1, 4, 5, 23)[(r + p) % 5], 40, dtype) for p in range(6)] for r in range(num_ranks)]
    with threads(1), hosts_of(num_hosts, layers, linear_placement(7, num_ranks), dtype, 4) as (hosts, _):
        on_ranks(hosts, xs, num_slices=2)


@pytest.mark.slow
def test_hosts_tell_one_another_of_their_rows() -> None:
    """Once a second."""
    layer = random_layer(30, (7, 40, 24), top_k=3)
    xs = [[tokens(r, 5 + r, 40)] for r in range(2)]
    with threads(1), hosts_of(2, [layer], linear_placement(7, 2)) as (hosts, _):
        on_ranks(hosts, xs)
        first, num_rows = hosts.services[0], (5 + 6) * 3
        while (first.counts().sum(), first.served().sum()) != (num_rows, num_rows):
            time.sleep(0.01)


@pytest.mark.slow
def test_connections_that_are_cut_at_any_time_cost_no_byte() -> None:
    """What was under way is lost, or comes twice."""
    layers = [random_layer(40 + i, (8, 48, 24), top_k=4) for i in range(3)]
    rng = np.random.default_rng(1)
    xs = [[tokens(40 * r + p, int(rng.integers(0, 20)), 48) for p in range(6 + 2 * r)] for r in range(4)]
    with threads(1), hosts_of(2, layers, linear_placement(8, 4), max_tokens=6) as (hosts, carrier):
        carrier.cut_every = 15
        on_ranks(hosts, xs, delay=0.001)
        assert carrier.num_cuts > 10
        assert carrier.num_frames > 50


def test_experts_move_between_hosts_while_ranks_use_them() -> None:
    """One expert goes from rank to rank. A third host hears of its new place after it has left the old one."""
    layer = random_layer(9, (6, 48, 24), top_k=3)
    placement: Placement = [[0, 1, None], [2, 3, None], [4, 5, None], [None, None, None]]
    xs = [[tokens(90 * r + p, 5, 48) for p in range(40)] for r in range(4)]
    is_over = threading.Event()
    moves: list[int] = []

    def wait_for(service: ExpertService, rank: int, expert: int) -> None:
        while expert not in service.placement(0)[rank]:
            time.sleep(0.001)

    def move(services: Sequence[ExpertService]) -> None:
        owner, slot = 0, 0
        while not is_over.is_set():
            borrower = (owner + 1 + len(moves) % 3) % 4
            services[borrower].set_slot(0, 2, layer.slot(0))
            services[borrower].publish(0, 2)
            wait_for(services[owner], borrower, 0)  # as the planner sees to
            services[owner].retire(0, slot)
            services[owner].set_slot(0, slot, None)
            owner, slot = borrower, 2
            moves.append(owner)

    with threads(1), hosts_of(4, [layer], placement) as (hosts, _):
        mover = threading.Thread(target=move, args=(hosts.services,))
        mover.start()
        try:
            on_ranks(hosts, xs)
            while len(set(moves)) <= 2:
                on_ranks(hosts, xs)
        finally:
            is_over.set()
            mover.join()


def test_a_host_that_starts_again_serves_what_was_asked_for() -> None:
    """Its memory is new; the other host waits meanwhile."""
    layer = random_layer(10, (6, 48, 24), top_k=3)
    x = tokens(0, 7, 48)
    with threads(1), hosts_of(2, [layer], linear_placement(6, 2)) as (hosts, carrier):
        first, second = hosts.services
        for seed in range(3):
            on_ranks(hosts, [[tokens(seed, 5, 48)], [tokens(9, 2, 48)]])
        second.abort()
        second.close()
        asked: list[Any] = []
        thread = threading.Thread(target=lambda: asked.extend(on_threads(1, lambda _: _run(first, x, layer))))
        thread.start()
        carrier.is_cut.set()
        while first.states()[1] != "loading":
            time.sleep(0.001)
        part = hosts.parts[1]
        os.close(part.fd)
        part.fd = expert_segment()
        hosts.services[1:] = hosts.open_host(1)
        carrier.restart(1, part.fd)
        carrier.is_cut.clear()
        thread.join()
        np.testing.assert_array_equal(bits(asked[0]), bits(in_one_process(layer, x)))
        on_ranks(hosts, [[tokens(7, 5, 48)], [tokens(8, 4, 48)]])


def _run(service: ExpertService, x: np.ndarray, layer: Layer) -> np.ndarray:
    y: np.ndarray = run_layer(service, x, layer.router_weight, **layer.routing)
    return y


def test_a_host_that_has_left_is_not_waited_for() -> None:
    layer = random_layer(11, (6, 48, 24), top_k=3)
    x = tokens(0, 7, 48)
    with threads(1), hosts_of(2, [layer], linear_placement(6, 2)) as (hosts, carrier):
        first, second = hosts.services
        np.testing.assert_array_equal(bits(_run(first, x, layer)), bits(in_one_process(layer, x)))
        with pytest.raises(ValueError, match="rank 0 has not left in time"):
            second.leave(0.01)
        while first.states()[1] != "leaving":
            time.sleep(0.001)
        carrier.is_cut.set()
        while first.states()[1] != "gone":
            time.sleep(0.001)
        with pytest.raises(ValueError, match="rank 1 has ended, and no other has its experts"):
            _run(first, x, layer)
        first.leave(1.0)


@contextlib.contextmanager
def mirrors_of(layer: Layer, placement: Placement) -> Iterator[tuple[list[ExpertService], list[ExpertMirror]]]:
    """Give those of hosts with a rank each, which serves; nothing carries their frames."""
    count = len(placement)
    parts = [Ranks([layer], placement, np.float32, 8, 60.0) for _ in range(count)]
    news = os.eventfd(0)
    services: list[ExpertService] = []
    mirrors: list[ExpertMirror] = []
    for host, part in enumerate(parts):
        assert ExpertMirror.open(part.fd, host, count, news) is None
        services.append(part.open(host))
        mirror = ExpertMirror.open(part.fd, host, count, news)
        assert mirror is not None
        mirrors.append(mirror)
    for own, other in itertools.permutations(range(count), 2):
        mirrors[own].begin(other)
    yield services, mirrors
    for mirror in mirrors:
        mirror.close()
    for service, part in zip(services, parts, strict=True):
        service.abort()
        service.close()
        os.close(part.fd)
    os.close(news)


def carry(mirrors: Sequence[ExpertMirror], sender: int, receiver: int) -> list[bytes]:
    frames = []
    while frame := mirrors[sender].collect(receiver):
        frames.append(frame)
        mirrors[receiver].apply(sender, frame)
    return frames


def test_an_expert_that_is_nowhere_as_yet_is_waited_for() -> None:
    """A host hears that an expert has left another one before it hears where it is."""
    layer = random_layer(14, (4, 48, 24), top_k=4)
    x = tokens(0, 3, 48)
    with threads(1), mirrors_of(layer, [[0, 1], [2, None], [3, None]]) as (services, mirrors):
        pairs = list(itertools.permutations(range(3), 2))
        for pair in pairs:
            carry(mirrors, *pair)
        services[2].set_slot(0, 1, layer.slot(2))
        services[2].publish(0, 1)
        services[1].retire(0, 0)
        services[1].set_slot(0, 0, None)
        carry(mirrors, 1, 0)
        assert 2 not in services[0].placement(0)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(on_threads(1, lambda _: _run(services[0], x, layer))))
        thread.start()
        time.sleep(0.05)
        while thread.is_alive():
            for pair in pairs:
                carry(mirrors, *pair)
        np.testing.assert_array_equal(bits(found[0]), bits(in_one_process(layer, x)))


def frames_of(layer: Layer, services: Sequence[ExpertService], mirrors: Sequence[ExpertMirror]) -> list[bytes]:
    """Frames of every kind from the first host to the second."""
    services[0].set_target(0, np.zeros((2, 2), np.int32))
    x = tokens(0, 5, 48)
    thread = threading.Thread(target=lambda: on_threads(2, lambda rank: _failing(services[rank], x, layer)))
    frames = carry(mirrors, 0, 1)
    carry(mirrors, 1, 0)
    thread.start()
    deadline = time.monotonic() + 60
    while len({frame[40] for frame in frames}) < 6:  # kinds, in the byte where they are
        assert time.monotonic() < deadline
        frames += carry(mirrors, 0, 1)
        carry(mirrors, 1, 0)
    for service in services:
        service.abort()
    thread.join()
    return frames


def _failing(service: ExpertService, x: np.ndarray, layer: Layer) -> None:
    _run(service, x, layer)
    while True:
        _run(service, x, layer)


@pytest.mark.slow
def test_frames_that_are_none_are_refused() -> None:
    layer = random_layer(12, (4, 48, 24))
    with threads(1), mirrors_of(layer, linear_placement(4, 2)) as (services, mirrors):
        frames = frames_of(layer, services, mirrors)
        assert all(frame[:4] == MAGIC for frame in frames)
        good = frames[0]
        for bad, what in (
            (b"", "a header"),
            (good[:79], "a header"),
            (b"X" + good[1:], "one of experts"),
            (good[:4] + b"\x09" + good[5:], "this version"),
            (good[:8] + b"\x09" + good[9:], "this model's shape"),
            (good[:40] + b"\x63" + good[41:], "a known kind"),
            (good[:44] + b"\x01" + good[45:], "its host's rank"),
            (good + b"\0", "its length"),
        ):
            with pytest.raises(ValueError, match=f"frame: expected {what}"):
                mirrors[1].apply(0, bad)
        with pytest.raises(ValueError, match="host: expected one of the mirror's"):
            mirrors[1].apply(2, good)
        # Whatever a byte becomes: refused or harmless.
        rng, refused = random.Random(1), list[str]()
        for frame in {frame[40]: frame for frame in frames}.values():
            for _ in range(120):
                bad_frame = bytearray(frame)
                for _ in range(rng.randint(1, 3)):
                    bad_frame[rng.randrange(40, min(len(frame), 200))] = rng.randrange(256)
                try:
                    mirrors[1].apply(0, bytes(bad_frame[: rng.choice((len(frame), rng.randrange(len(frame))))]))
                except ValueError as error:
                    refused.append(str(error))
        assert len(refused) > 200
        assert all("frame: expected" in text for text in refused)
        mirrors[1].lose(0)
        with pytest.raises(ValueError, match="frame: expected one of a connected host"):
            mirrors[1].apply(0, good)
