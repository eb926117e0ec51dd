"""Experts that ranks share: the bytes of moe_ffn in one process, for any placement and order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.expert_types import ExpertSlot
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.ops import collective
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.ops.experts import combine_experts, dispatch_experts
from fastdeploy_sd.ops.packing import PackedExperts
from fastdeploy_sd.ops.reference import experts as reference
from tests.ops.backends import threads
from tests.ops.cases.experts import run_layer
from tests.ops.expert_hosts import Hosts
from tests.ops.expert_model import (
    Layer,
    Placement,
    Ranks,
    in_one_process,
    linear_placement,
    random_layer,
    ranks_of,
)
from tests.ops.ranks import on_threads, shared_group
from tests.ops.test_grouped_linear import matrix, packed

GROUPS: dict[str, Any] = {"sigmoid": True, "num_groups": 4, "num_chosen_groups": 2, "scale": 2.5}


def on_ranks(ranks: Ranks | Hosts, xs: Sequence[Sequence[np.ndarray]], delay: float = 0.0, **options: Any) -> None:
    """Run passes over all layers on all ranks at once, and compare what each gets with one process.

    Args:
        xs: by rank: the tokens of each of its passes.
        delay: seconds that a rank waits at most before a layer.
    """
    last = len(ranks.layers) - 1

    def passes(rank: int) -> list[list[np.ndarray]]:
        rng, service, found = np.random.default_rng(rank), ranks.services[rank], []
        for x in xs[rank]:
            ys = []
            for i, layer in enumerate(ranks.layers):
                time.sleep(rng.random() * delay)
                of_pass = {"is_first": i == 0, "is_last": i == last}
                ys.append(run_layer(service, x, layer.router_weight, i, **layer.routing, **options, **of_pass))
            found.append(ys)
        return found

    for rank, got in enumerate(on_threads(len(xs), passes)):
        assert not isinstance(got, Exception), f"rank {rank}: {got}"
        for p, ys in enumerate(got):
            for i, y in enumerate(ys):
                want = in_one_process(ranks.layers[i], xs[rank][p], **options)
                np.testing.assert_array_equal(bits(y), bits(want), err_msg=f"rank {rank}, pass {p}, layer {i}")


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32) if array.dtype == np.float32 else array


def tokens(seed: int, count: int, hidden: int, dtype: Any = np.float32) -> np.ndarray:
    x: np.ndarray = np.random.default_rng(seed).standard_normal((count, hidden), np.float32)
    return to_bf16(x) if dtype == np.uint16 else x


def gguf_layer(name: str, num_experts: int) -> Layer:
    """Experts in a format whose scales are of groups."""
    size, parts = 256, []
    for rows in (2 * size, size):
        whole = matrix((name, num_experts * rows), num_columns=size)
        own = [packed(whole.rows([range(e * rows, (e + 1) * rows)]), BLOCK_TYPES[name].fmt) for e in range(num_experts)]
        data = WeightMemory().take(sum(part.data.nbytes for part in own))
        data[:] = np.concatenate([part.data for part in own])
        parts.append(PackedExperts(data, num_experts, size, rows, own[0].format))
    router = np.random.default_rng(3).standard_normal((num_experts, size), np.float32)
    return Layer(router, parts[0], parts[1], {"top_k": 2, "normalize": True, "norm_min": 1e-12})


LAYERS: dict[str, Callable[[], Layer]] = {
    "float32": lambda: random_layer(0, (7, 40, 24)),
    "bfloat16": lambda: random_layer(1, (7, 150, 70), "bfloat16", top_k=1),
    "wint8": lambda: random_layer(2, (9, 150, 70), "wint8", top_k=8),
    "wint4": lambda: random_layer(3, (8, 150, 70), "wint4"),
    "e4m3": lambda: random_layer(4, (8, 150, 70), "e4m3"),
    "groups": lambda: random_layer(5, (12, 50, 24), top_k=5, **GROUPS),
    "gpt-oss": lambda: random_layer(6, (6, 64, 32), "bfloat16", has_bias=True, gate_limit=1.5),
    "mxfp4": lambda: gguf_layer("MXFP4", 5),
    "q4_k": lambda: gguf_layer("Q4_K", 4),
}


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_get_the_bytes_of_one_process(name: str, dtype: Any) -> None:
    """Each has its own tokens: none, one, as many as fit, one more, several rounds of them."""
    layer = LAYERS[name]()
    hidden = layer.down.out_features
    for num_ranks in (1, 2, 3, 4):
        xs = [
            [tokens(10 * r + p, (0, 1, 4, 5, 23)[(r + p) % 5], hidden, dtype) for p in range(5)]
            for r in range(num_ranks)
        ]
        placement = linear_placement(layer.num_experts, num_ranks)
        with threads(1), ranks_of([layer, layer], placement, dtype, max_tokens=4) as ranks:
            on_ranks(ranks, xs, num_slices=4)


@pytest.mark.parametrize("skew", ["one expert", "one rank", "not the first rank"])
def test_tokens_that_all_want_the_same_ranks_get_their_bytes(skew: str) -> None:
    """More of them than the service takes at a time."""
    chosen = {"one expert": range(2, 3), "one rank": range(2, 4), "not the first rank": range(2, 6)}[skew]
    bias = np.full(6, -9, np.float32)
    bias[chosen.start : chosen.stop] = 9
    layer = random_layer(7, (6, 48, 24), top_k=min(len(chosen), 2), selection_bias=bias)
    xs = [[tokens(10 * r + p, 40, 48) for p in range(2)] for r in range(3)]
    with threads(1), ranks_of([layer], linear_placement(6, 3), max_tokens=16) as ranks:
        on_ranks(ranks, xs)
        counts = ranks.services[1].counts()
    assert counts.sum() == 3 * 2 * 40 * layer.routing["top_k"]
    assert not np.delete(counts, list(chosen), axis=1).any()


def test_replicas_and_slots_in_any_order_change_no_byte() -> None:
    layer = random_layer(8, (5, 48, 24), top_k=3)
    placement: Placement = [[4, 0, None], [0, 2, 1], [1, 3, 0]]
    xs = [[tokens(10 * r + p, 9, 48) for p in range(3)] for r in range(3)]
    with threads(1), ranks_of([layer], placement) as ranks:
        on_ranks(ranks, xs)
        assert ranks.services[0].placement(0).tolist() == [[-1 if e is None else e for e in own] for own in placement]


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_any_shape_and_placement_gives_the_bytes_of_one_process(data: st.DataObject) -> None:
    """Experts have one to three copies, in any slots of any ranks."""
    num_ranks, num_experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 11))
    sizes = num_experts, data.draw(st.integers(8, 140)), data.draw(st.integers(8, 70))
    fmt = data.draw(st.sampled_from(["float32", "bfloat16", "wint8", "wint4"]))
    layer = random_layer(data.draw(st.integers(0, 99)), sizes, fmt, top_k=data.draw(st.integers(1, num_experts)))
    homes = st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=3)
    experts: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert, ranks_with_it in enumerate(data.draw(st.lists(homes, min_size=num_experts, max_size=num_experts))):
        for rank in ranks_with_it:
            experts[rank].append(expert)
    most = max(map(len, experts))
    placement = [data.draw(st.permutations([*own, *[None] * (most - len(own))])) for own in experts]
    xs = [[tokens(rank, data.draw(st.integers(0, 9)), sizes[1])] for rank in range(num_ranks)]
    num_slices = data.draw(st.sampled_from([1, 2, 4]))
    with threads(1), ranks_of([layer], placement, max_tokens=data.draw(st.integers(1, 6))) as ranks:
        on_ranks(ranks, xs, num_slices=num_slices)


def test_the_order_in_which_ranks_come_changes_no_byte() -> None:
    """Each waits for random times before its layers, in passes of its own number and sizes."""
    layers = [random_layer(20 + i, (8, 48, 24), top_k=6) for i in range(3)]
    rng = np.random.default_rng(1)
    xs = [[tokens(40 * r + p, int(rng.integers(0, 9)), 48) for p in range(8 + 4 * r)] for r in range(4)]
    with threads(1), ranks_of(layers, linear_placement(8, 4), max_tokens=6) as ranks:
        on_ranks(ranks, xs, delay=0.002, num_slices=2)
        on_ranks(ranks, xs, num_slices=2)


def test_experts_move_while_ranks_use_them() -> None:
    """To another rank's free slot and back; what an expert has left is overwritten."""
    layer = random_layer(9, (6, 48, 24), "bfloat16", top_k=3)
    placement: Placement = [[0, 1, None], [2, 3, None], [4, 5, None]]
    xs = [[tokens(90 * r + p, 5, 48) for p in range(60)] for r in range(3)]
    is_over = threading.Event()
    moves: list[int] = []

    def move(services: Sequence[ExpertService]) -> None:
        where = {e: (r, s) for r, own in enumerate(placement) for s, e in enumerate(own) if e is not None}
        free = [(r, 2) for r in range(3)]
        own_memory: dict[tuple[int, int], Any] = {}
        while not is_over.is_set():
            expert = len(moves) % 6
            rank, slot = free.pop(0)
            own = own_memory[rank, slot] = [copied(layer.gate_up, expert), copied(layer.down, expert)]
            services[rank].set_slot(0, slot, ExpertSlot(expert, *(data.ctypes.data for data in own)))
            services[rank].publish(0, slot)
            old_rank, old_slot = where[expert]
            version = services[old_rank].retire(0, old_slot)
            if len(moves) % 2 == 0:  # else what is under way is sent back
                assert services[0].wait_older_jobs(version, 60)
            services[old_rank].set_slot(0, old_slot, None)
            for data in own_memory.get((old_rank, old_slot), ()):
                data[:] = 255
            where[expert] = rank, slot
            free.append((old_rank, old_slot))
            moves.append(expert)

    with threads(1), ranks_of([layer], placement) as ranks:
        mover = threading.Thread(target=move, args=(ranks.services,))
        mover.start()
        try:
            on_ranks(ranks, xs)
        finally:
            is_over.set()
            mover.join()
    assert len(moves) > 6


def copied(experts: PackedExperts[Any], expert: int) -> np.ndarray:
    size = experts.data.nbytes // experts.num_experts
    data = WeightMemory().take(size)
    data[:] = experts.data[expert * size :][:size]
    return data


def test_a_rank_in_an_all_reduce_runs_its_experts_for_others() -> None:
    """Ranks 0 and 1 share their tokens; rank 1 comes to the sum only after rank 2 has its answer."""
    layer = random_layer(10, (6, 48, 24), top_k=3)
    x, other = tokens(0, 7, 48), tokens(1, 5, 48)
    has_answer, is_reducing = threading.Event(), threading.Event()

    with threads(1), ranks_of([layer], linear_placement(6, 3)) as ranks, shared_group(2) as ends:

        def run(rank: int) -> Any:
            service = ranks.services[rank]
            if rank == 2:
                assert is_reducing.wait(60)
                y = run_layer(service, other, layer.router_weight, **layer.routing)
                has_answer.set()
                return y
            of_part: dict[str, Any] = {"part": rank, "num_parts": 2, "out_dtype": np.float32}
            own = run_layer(service, x, layer.router_weight, **layer.routing, **of_part, num_slices=2)
            if rank == 0:
                is_reducing.set()
            else:
                assert has_answer.wait(60)
            return collective.all_reduce(own, ends[rank], np.float32)

        results: Any = on_threads(3, run)
    first, second, third = results
    want = bits(in_one_process(layer, x, num_slices=2))
    np.testing.assert_array_equal(bits(first), want)
    np.testing.assert_array_equal(bits(second), want)
    np.testing.assert_array_equal(bits(third), bits(in_one_process(layer, other)))


def test_a_part_of_the_tokens_is_routed_as_the_definition_says() -> None:
    layer = random_layer(11, (12, 50, 24), top_k=5, **GROUPS)
    x = tokens(3, 10, 50)
    for part in range(3):
        options = {**layer.routing, "part": part, "num_parts": 3}
        ids, weights = dispatch_experts(x, layer.router_weight, None, 0, **options)
        want_ids, want_weights = reference.dispatch_experts(x, layer.router_weight, **options)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_allclose(weights, want_weights, rtol=1e-5)


def test_what_does_not_fit_the_service_is_named() -> None:
    layer = random_layer(12, (4, 48, 24))
    x = tokens(0, 2, 48)
    with threads(1), ranks_of([layer], linear_placement(4, 2)) as ranks:
        service, other = ranks.services
        options = dict(layer.routing)
        with pytest.raises(ValueError, match="layer: expected a layer of the service"):
            dispatch_experts(x, layer.router_weight, service, 1, **options)
        with pytest.raises(ValueError, match="x: expected the layer's dtype"):
            dispatch_experts(to_bf16(x), layer.router_weight, service, 0, **options)
        with pytest.raises(ValueError, match="top_k: expected that of the layer"):
            dispatch_experts(x, layer.router_weight, service, 0, **options | {"top_k": 1})
        with pytest.raises(ValueError, match="part: expected 0 to num_parts - 1"):
            dispatch_experts(x, layer.router_weight, service, 0, part=2, num_parts=2, **options)
        ids, weights = dispatch_experts(x, layer.router_weight, service, 0, **options)
        with pytest.raises(ValueError, match="x: expected the rows that dispatch_experts has just had"):
            combine_experts(x[:1], ids[:1], weights[:1], service, 0)
        np.testing.assert_array_equal(combine_experts(x, ids, weights, service, 0), in_one_process(layer, x))
        service.set_slot(0, 1, None)
        with pytest.raises(ValueError, match="slot: expected one that has an expert"):
            service.publish(0, 1)
        with pytest.raises(ValueError, match="weights: expected addresses that are multiples of 64"):
            service.set_slot(0, 1, ExpertSlot(1, 65, 64))
        with pytest.raises(ValueError, match="shape: expected that of the other ranks"):
            ExpertService.open(ranks.fd, 0, replace(service.shape, max_tokens=9))
        with pytest.raises(ValueError, match="rank 1 has not left in time"):
            service.leave(0.01)
        assert other.states() == ("leaving", "serving")


def test_a_service_that_is_closed_may_be_aborted() -> None:
    """As by the thread that watches the other ranks."""
    with threads(1), ranks_of([random_layer(12, (4, 48, 24))], linear_placement(4, 2)) as ranks:
        service = ranks.services.pop()
        service.close()
        service.abort()


def test_ranks_leave_together() -> None:
    layer = random_layer(13, (4, 48, 24))
    with threads(1), ranks_of([layer], linear_placement(4, 3)) as ranks:
        xs = [[tokens(r, 3, 48)] for r in range(3)]
        on_ranks(ranks, xs)
        ranks.services[0].mark_gone(2)
        assert on_threads(2, lambda rank: ranks.services[rank].leave(60)) == [None, None]
        assert ranks.services[0].states() == ("gone", "gone", "gone")
