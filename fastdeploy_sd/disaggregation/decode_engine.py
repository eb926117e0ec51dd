"""DecodeEngine: an engine whose prompts get their KV from the prefill instances that their requests name.

What comes is the KV of all tokens but the last one, and the recurrent states after them. Computing that one again gives
the first output token here, and verifies the drafts that came along. Whatever goes wrong, the prompt is computed here.
Knows no socket and no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fastdeploy_sd.config import Config
from fastdeploy_sd.disaggregation.transfer.events import Event, Fetched, FetchFailed, TransferId
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.engine.interfaces.kv_connector import KvArrival
from fastdeploy_sd.engine.kvcache.block_table import NO_BLOCK
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.types import EMPTY_I32, I32, KvDescription, KvSource, ModelInfo, Request, RequestId
from fastdeploy_sd.types.stats import EngineStats, TransferStats

_log = logging.getLogger(__name__)

ORIGIN = "prefill"
_MAX_REASONS = 1000


class Fetcher(Protocol):
    """The part of a KvConnector that a decode instance uses; see there."""

    fd: int

    def take_events(self) -> list[Event]: ...

    def fetch(
        self, request: Request, source: KvSource, first_block: int, block_ids: Sequence[int], timeout_s: float
    ) -> TransferId: ...

    def cancel(self, transfer_id: TransferId) -> None: ...


@dataclass(frozen=True, slots=True)
class _Order:
    """A request that waits, and its tokens that are here or will be; `is_complete`: those are all but the last one."""

    request: Request
    num_cached_tokens: int
    num_tokens: int
    is_complete: bool
    keeps_draft_kv: bool


class DecodeConnector:
    """See the module, and KVConnector; `timeout_s` bounds a prefill instance's time without progress."""

    def __init__(self, connector: Fetcher, model_info: ModelInfo, num_draft_layers: int, timeout_s: float) -> None:
        self._connector, self._info, self._timeout_s = connector, model_info, timeout_s
        self._num_draft_layers = num_draft_layers
        self._kv: KVCacheManager | None = None
        self._orders: dict[TransferId, _Order] = {}
        self._transfer_of: dict[RequestId, TransferId] = {}
        self._said: set[tuple[str, str]] = set()
        self.fd: int | None = connector.fd

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        """Order the KV that is missing, unless that is less than a block, or the request has gone on here already."""
        num_given, block_size = len(request.prompt_token_ids) + len(request.output_token_ids), self._info.block_size
        source, num_tokens = request.kv_source, len(token_ids) - 1
        if source is None or len(token_ids) > num_given or num_tokens - num_cached_tokens < block_size:
            return False
        speculation = self._info.speculation
        keeps_draft_kv = speculation.keeps_draft_kv(speculation.method_of(request.speculation))
        if keeps_draft_kv and self._num_draft_layers > 1:
            num_tokens -= num_tokens % block_size  # see KvArrival.is_draft_ahead
        first_block, end_block = num_cached_tokens // block_size, -(-len(token_ids) // block_size)
        assert self._kv is not None, "attached to an engine"
        table = self._kv.table(request.request_id)
        states = self._kv.states
        place = states.expect(table) if states is not None else None
        if states is not None and place is None:
            return False
        if not self._kv.skip_to(table, len(token_ids) - 1, len(token_ids)):
            self._take_state(request.request_id, has_come=False)
            return False
        wanted = [block_id for own in table.groups for block_id in own.block_ids[first_block:end_block]]
        if place is not None:
            wanted += [NO_BLOCK] * (end_block - first_block - 1) + [place]
        # To whom computes it, output that the request came with is part of the prompt.
        order = replace(
            request,
            prompt_token_ids=token_ids,
            output_token_ids=EMPTY_I32,
            max_tokens=request.max_tokens - len(request.output_token_ids),
        )
        transfer_id = self._connector.fetch(order, source, first_block, wanted, self._timeout_s)
        is_complete = num_tokens == len(token_ids) - 1
        self._orders[transfer_id] = _Order(request, num_cached_tokens, num_tokens, is_complete, keeps_draft_kv)
        self._transfer_of[request.request_id] = transfer_id
        return True

    def attach(self, kv: KVCacheManager) -> None:
        """Bring KV into these blocks, of the engine that this is the connector of."""
        self._kv = kv

    def cancel(self, request_id: RequestId) -> None:
        """See KVConnector; the transfer writes nothing when this returns."""
        transfer_id = self._transfer_of.pop(request_id)
        del self._orders[transfer_id]
        self._connector.cancel(transfer_id)

    def arrivals(self) -> Sequence[KvArrival]:
        arrived = []
        for event in self._connector.take_events():
            order = self._orders.pop(event.transfer_id, None)
            if order is None:
                continue
            del self._transfer_of[order.request.request_id]
            self._take_state(order.request.request_id, has_come=isinstance(event, Fetched))
            if isinstance(event, Fetched):
                arrived.append(self._arrival(order, event.drafts))
            else:
                self._say(order.request, event)
                failure = event.failure.value if isinstance(event, FetchFailed) else ""
                is_lost = self._kv is not None and self._kv.has_windows
                arrived.append(
                    KvArrival(order.request.request_id, order.num_cached_tokens, is_lost=is_lost, failure=failure)
                )
        return arrived

    def _take_state(self, request_id: RequestId, *, has_come: bool) -> None:
        assert self._kv is not None, "attached to an engine"
        if self._kv.states is not None:
            self._kv.states.take_arrival(self._kv.table(request_id), has_come=has_come)

    def _arrival(self, order: _Order, drafts: tuple[int, ...]) -> KvArrival:
        vocab_size = self._info.vocab_size
        is_known = all(0 <= token_id < vocab_size for token_id in drafts)
        return KvArrival(
            order.request.request_id,
            order.num_tokens,
            drafts if order.is_complete and is_known else (),
            is_draft_ahead=order.is_complete and self._num_draft_layers == 1 and order.keeps_draft_kv,
            origins={ORIGIN: order.num_tokens - order.num_cached_tokens},
        )

    def _say(self, request: Request, event: Event) -> None:
        """Log why a prompt is computed here, once for each source and kind of reason."""
        assert request.kv_source is not None, "it was ordered"
        if not isinstance(event, FetchFailed):
            return
        what = request.kv_source.address, event.failure.value
        level = logging.DEBUG if what in self._said else logging.WARNING
        if len(self._said) < _MAX_REASONS:
            self._said.add(what)
        _log.log(
            level, "the KV of a prompt did not come from %s (%s), so it is computed here; further cases of this"
            " kind are only counted: %s", *what, event.reason,
        )  # fmt: skip


class Receiver(Fetcher, Protocol):
    """The part of a KvConnector that a decode instance uses; see there."""

    description: KvDescription

    def stats(self) -> TransferStats: ...


class DecodeEngine(Engine):
    """See the module; `connector`: the caller's to close, after this engine. `num_draft_layers`: whose KV comes too."""

    def __init__(self, config: Config, executor: Executor, connector: Receiver, num_draft_layers: int) -> None:
        self._connector = connector
        timeout_s = config.splitwise.pd_timeout_s
        decode = DecodeConnector(connector, executor.model_info, num_draft_layers, timeout_s)
        super().__init__(config, executor, decode)
        decode.attach(self._pool.kv)

    @property
    def model_info(self) -> ModelInfo:
        """What the executor has loaded, and which KV it takes."""
        return replace(super().model_info, kv=self._connector.description)

    def stats(self) -> EngineStats:
        return replace(super().stats(), transfers=self._connector.stats())
