"""A KV connector for toy engines: at random it brings all, a part or nothing, with right or wrong drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.engine.interfaces.kv_connector import KvArrival
from fastdeploy_sd.types import I32, Request, RequestId
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import extend_prefix, root_prefix

_GARBAGE = -7


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A request that waits: its tokens, the hash after each, those it had when it began, and its blocks."""

    request: Request
    token_ids: list[int]
    prefixes: list[int]
    num_cached_tokens: int
    block_ids: list[int]


class ToyConnector:
    """Writes into the toy executor's caches as a transport would, garbage first, and fails on calls out of turn.

    Attributes:
        rate: share of the requests that are made to wait.
        executor: to be set before the first step. waiting: ids of those that wait and have not arrived.
        num_begun, num_cancelled, num_failed, num_whole, num_drafts: what it did.
    """

    fd: int | None = None

    def __init__(self, seed: int, rate: float) -> None:
        self.executor: ToyExecutor | None = None
        self.num_begun = self.num_cancelled = self.num_failed = self.num_whole = self.num_drafts = 0
        self.rate = rate
        self._random = random.Random(seed)
        self._transfers: dict[RequestId, _Transfer] = {}
        self._arrived: dict[RequestId, KvArrival] = {}

    @property
    def waiting(self) -> list[RequestId]:
        return sorted(self._transfers)

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        name = request.request_id
        assert name not in self._transfers.keys() | self._arrived.keys(), f"{name} was begun twice"
        if self._random.random() >= self.rate:
            return False
        prefixes, prefix = list[int](), root_prefix(request.adapter_digest)
        for token_id in token_ids.tolist():
            prefix = extend_prefix(prefix, token_id)
            prefixes.append(prefix)
        transfer = _Transfer(request, token_ids.tolist(), prefixes, num_cached_tokens, list(block_ids))
        self._transfers[name] = transfer
        self.num_begun += 1
        num_missing = len(token_ids) - num_cached_tokens
        self._executor.put_kv(transfer.block_ids, num_cached_tokens, [_GARBAGE] * num_missing, len(token_ids))
        return True

    def cancel(self, request_id: RequestId) -> None:
        assert (request_id in self._transfers) != (request_id in self._arrived), f"{request_id} does not wait"
        self._transfers.pop(request_id, None)
        self._arrived.pop(request_id, None)
        self.num_cancelled += 1

    def arrivals(self) -> list[KvArrival]:
        arrived = list(self._arrived.values())
        self._arrived.clear()
        for arrival in arrived:
            self._executor.expect_drafts(arrival.request_id, arrival.drafts)
        return arrived

    def finish(self, request_id: RequestId, num_tokens: int | None = None, num_drafts: int | None = None) -> None:
        """Let a request arrive at the next step, with so much; None = something random."""
        t = self._transfers.pop(request_id)
        block_size, last = self._executor.model_info.block_size, len(t.token_ids) - 1
        if num_tokens is None:
            part = self._random.randint(t.num_cached_tokens // block_size, last // block_size) * block_size
            num_tokens = self._random.choice([t.num_cached_tokens, last, max(part, t.num_cached_tokens)])
        is_ahead = num_tokens % block_size != 0 or (num_tokens > t.num_cached_tokens and self._random.random() < 0.5)
        new = t.prefixes[t.num_cached_tokens : num_tokens + 1]
        self._executor.put_kv(t.block_ids, t.num_cached_tokens, new[: num_tokens - t.num_cached_tokens], num_tokens)
        if is_ahead:
            self._executor.draft_layers.put(t.block_ids, num_tokens, t.prefixes[num_tokens])
        drafts = self._drafts(t, num_drafts) if num_tokens == last else []
        self.num_failed += num_tokens == t.num_cached_tokens
        self.num_whole += num_tokens == last
        self.num_drafts += len(drafts)
        origins = {"elsewhere": num_tokens - t.num_cached_tokens}
        self._arrived[request_id] = KvArrival(request_id, num_tokens, tuple(drafts), is_ahead, origins)

    def _drafts(self, t: _Transfer, num_drafts: int | None) -> list[int]:
        """Right ones, up to where they begin to be wrong."""
        model, prefix, drafts = self._executor.model, t.prefixes[-1], list[int]()
        num_output = len(t.token_ids) - len(t.request.prompt_token_ids)
        for i in range(self._random.randint(0, 9) if num_drafts is None else num_drafts):
            token_id = model.next_token(t.request, prefix, num_output + i)
            if num_drafts is None and self._random.random() < 0.2:
                token_id = self._random.randrange(2, self._executor.model_info.vocab_size)
            drafts.append(token_id)
            prefix = extend_prefix(prefix, token_id)
        return drafts

    @property
    def _executor(self) -> ToyExecutor:
        assert self.executor is not None, "the connector has no executor"
        return self.executor
