"""A decode and a prefill engine of this process with a wire between them, driven step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from fastdeploy_sd.cli.verify import EngineVariant, Reference
from fastdeploy_sd.cli.verify.answers import Answer, AnswerCollector
from fastdeploy_sd.cli.verify.methods import Method
from fastdeploy_sd.cli.verify.runs import engine_config
from fastdeploy_sd.config import ParallelConfig, SplitwiseConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.disaggregation.decode_engine import DecodeConnector
from fastdeploy_sd.disaggregation.prefill_engine import PrefillEngine
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import FinishReason, Request, RequestId
from tests.doubles.wire import SOURCE, Wire

MAX_TURNS = 20_000
ROLES: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")


@dataclass
class Pair:
    """Both engines.

    Attributes:
        aborted: requests that were aborted, with what they had got.
    """

    decode: Engine
    prefill: PrefillEngine
    wire: Wire
    collector: AnswerCollector = field(default_factory=AnswerCollector)
    ended: dict[RequestId, FinishReason] = field(default_factory=dict)

    def run(
        self,
        requests: Sequence[Request],
        rng: random.Random,
        *,
        arrivals_per_turn: int = 3,
        each_turn: Callable[[], None] = lambda: None,
    ) -> dict[RequestId, Answer]:
        """Run requests to their end, one step of each engine and some pages per turn, checking every invariant."""
        pending = [replace(request, kv_source=SOURCE) for request in requests]
        for _ in range(MAX_TURNS):
            for request in pending[:arrivals_per_turn]:
                self.decode.submit(request)
            del pending[:arrivals_per_turn]
            each_turn()
            self._step()
            self.wire.pump(rng.choice([0, 1, 5, 50, 500]))
            if not (pending or self.decode.has_work() or self.prefill.has_work()):
                self._check_end()
                return {r.request_id: self.collector.answer(r.request_id) for r in requests}
        raise AssertionError("the engines do not come to an end")

    def abort(self, request_id: RequestId) -> None:
        """End a request at its client."""
        for output in self.decode.abort([request_id]):
            self._take(output.request_id, output.finish_reason)
            self.collector.add(output)

    def _step(self) -> None:
        for output in self.decode.step():
            self._take(output.request_id, output.finish_reason)
            self.collector.add(output)
        self.decode.check_integrity()
        assert self.prefill.step() == [], "an order's output left its engine"
        self.prefill.check_integrity()

    def _take(self, request_id: RequestId, finish_reason: FinishReason | None) -> None:
        assert request_id not in self.ended, "an output after the end"
        if finish_reason is not None:
            self.ended[request_id] = finish_reason

    def _check_end(self) -> None:
        assert self.wire.waiting == []
        for engine in (self.decode, self.prefill):
            stats = engine.stats()
            assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "blocks were lost"
            assert stats.num_requests == sum(stats.num_finished.values())


@contextmanager
def open_pair(
    reference: Reference,
    decode: tuple[EngineVariant, Method],
    prefill: tuple[EngineVariant, Method],
    seed: int,
    num_ranks: tuple[int, int] = (1, 1),
    *,
    spreads_experts: bool = False,
) -> Iterator[Pair]:
    """Load the model twice, each in its way and with its method, on so many ranks for decode and prefill."""
    wire, num_threads = Wire(seed), library.num_threads()
    configs = [
        replace(
            engine_config(reference.base, way, method),
            splitwise=SplitwiseConfig(splitwise_role=role),
            # Slow steps of a busy machine are no hang.
            parallel=ParallelConfig(
                tensor_parallel_size=size, enable_expert_parallel=spreads_experts, rank_timeout_s=60.0
            ),
        )
        for role, (way, method), size in zip(ROLES, (decode, prefill), num_ranks, strict=True)
    ]
    with ExitStack() as opened:
        opened.callback(library.set_num_threads, num_threads)
        target = create_executor(configs[0])
        opened.callback(target.shutdown)
        source = create_executor(configs[1])
        opened.callback(source.shutdown)
        wire.target_pages, wire.source_pages = target.kv_pages, source.kv_pages
        num_draft_layers = target.kv_pages.num_layers - target.kv_pages.num_target_layers
        connector = DecodeConnector(wire.decode, target.model_info, num_draft_layers, 60.0)
        pair = Pair(
            Engine(configs[0], target, connector),
            PrefillEngine(
                configs[1], source, wire.prefill, source.kv_pages.groups, source.kv_pages.num_target_layers,
                source.layer_signals,
            ),
            wire,
        )  # fmt: skip
        connector.attach(pair.decode._pool.kv)
        opened.callback(pair.prefill.close)
        wire.before_move = lambda *move: check_owners(pair, *move)
        yield pair


def check_states(pair: Pair, transfer_id: str, request_id: RequestId, source_id: int, target_id: int) -> None:
    """As `check_owners`, of snapshots."""
    pool = pair.decode._pool
    source, target = pair.prefill._pool.kv.states, pool.kv.states
    assert source is not None
    assert target is not None
    assert source._held[transfer_id] == source_id, "a snapshot that is not held"
    assert not pool.states[request_id].is_ready, "a request whose state is written runs"
    assert pool.states[request_id].table.states.arriving == target_id, "a place of another request"
    assert target._pool.ref_count(target_id) == 1, "a shared place"


def check_owners(
    pair: Pair, transfer_id: str, request_id: RequestId, group: int, source_id: int, target_id: int
) -> None:
    """A page moves out of a block that is held for this transfer, and into one that is its request's alone."""
    pool = pair.decode._pool
    if group == len(pool.kv.groups):
        check_states(pair, transfer_id, request_id, source_id, target_id)
        return
    assert source_id in pair.prefill._pool.kv._held[transfer_id], "a page that is not held"
    assert not pool.states[request_id].is_ready, "a request whose KV is written runs"
    assert target_id in pool.states[request_id].table.block_ids, "a page of another request"
    assert pool.kv._pool.ref_count(target_id) == 1, "a shared page"
