"""PrefillEngine: an engine that also computes prompts for decode instances, and sends their KV while it does.

An order is an ordinary request that ends with its first output token. Its pages go layer by layer: blocks that the
prefix cache has at once, others as soon as they are full, the last one when the prompt is done. The recurrent states
before the prompt's last token are pages of one snapshot. The first token and the drafts after it go last. The blocks of
an order are held until the connector has said `Sent`, whatever becomes of the request, so no other request's KV is ever
in a page that may still be read. Knows no socket and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fastdeploy_sd.config import Config
from fastdeploy_sd.disaggregation.layer_sender import LayerSender, Signals
from fastdeploy_sd.disaggregation.prompt_order import prompt_only
from fastdeploy_sd.disaggregation.transfer.events import Event, PrefillCancelled, PrefillWanted, Sent, TransferId
from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.connector_chain import ArrivalFds
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.engine.requests.request_state import RequestStatus
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.types import (
    FinishReason,
    KvDescription,
    ModelInfo,
    RequestMetrics,
    RequestOutput,
    SchedulerOutput,
    StepResult,
)
from fastdeploy_sd.types.stats import EngineStats, TransferStats


class Sender(Protocol):
    """The part of a KvConnector that a prefill instance uses; see there."""

    fd: int
    address: str
    description: KvDescription

    def take_events(self) -> list[Event]: ...

    def send(self, transfer_id: TransferId, layer: int, first_block: int, block_ids: Sequence[int]) -> None: ...

    def note_step(self) -> None: ...

    def finish(self, transfer_id: TransferId, drafts: tuple[int, ...]) -> None: ...

    def fail(self, transfer_id: TransferId, reason: str) -> None: ...

    def stats(self) -> TransferStats: ...


@dataclass(slots=True, eq=False)
class _Export:
    """An order, from PrefillWanted to Sent.

    Attributes:
        next_blocks, end_block: blocks of the prompt that are still to be sent, per KV group. Those that were are held.
        has_run: whether a step had it.
        has_state: whether the recurrent state counts as sent, likewise.
        is_over: whether the connector was told how it ended.
        num_tokens: of the prompt. trace_context: of its request.
    """

    next_blocks: list[int]
    end_block: int
    has_run: bool = False
    has_state: bool = False
    is_over: bool = False
    num_tokens: int = 0
    trace_context: str = ""


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of one order that a step completes, in the layers of a KV group."""

    transfer_id: TransferId
    group: int
    first_block: int
    block_ids: Sequence[int]


class PrefillEngine(Engine):
    """See the module. Orders do not show in what `submit`, `abort` and `step` take and return.

    `groups`: KV group of every layer of pages, of which the first `num_target_layers` signal while a step runs; without
    signals all go after it.

    Attributes:
        trace: gets the trace context of each order that has one and is done, its times, tokens and cached ones.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        connector: Sender,
        groups: Sequence[int],
        num_target_layers: int,
        signals: Signals | None,
    ) -> None:
        super().__init__(config, executor)
        self.trace: Callable[[str, RequestMetrics, int, int], None] = lambda *_: None
        self._connector, self._groups = connector, groups
        self._layers = None if signals is None else LayerSender(signals, num_target_layers, self._send_layer)
        self._exports: dict[TransferId, _Export] = {}  # a request has the id of its transfer
        self._is_draining = False
        self._all_fds = ArrivalFds([connector.fd, super().arrival_fd])

    @property
    def model_info(self) -> ModelInfo:
        """What the executor has loaded, and which orders are taken where."""
        return replace(super().model_info, kv_address=self._connector.address, kv=self._connector.description)

    @property
    def arrival_fd(self) -> int | None:
        """A descriptor that is readable while the connector, or what Engine waits for, has something for `step`."""
        return self._all_fds.fd

    def has_work(self) -> bool:
        return super().has_work() or bool(self._exports)

    def stats(self) -> EngineStats:
        return replace(super().stats(), transfers=self._connector.stats())

    def drain(self) -> None:
        """Take no more orders; those that were taken go on."""
        self._is_draining = True

    def end(self) -> None:
        """Give all orders up. No step may follow while the connector still sends what was finished before."""
        for transfer_id in list(self._exports):
            self._fail(transfer_id, "the prefill instance ends")
            self._forget(transfer_id)

    def close(self) -> None:
        """End the thread that sends layers. May be called twice."""
        if self._layers is not None:
            self._layers.close()

    def step(self) -> list[RequestOutput]:
        """As Engine.step; takes and ends orders too."""
        for event in self._connector.take_events():
            self._take(event)
        outputs = super().step()
        self._give_up_preempted()
        return outputs

    def _take_prepared(self) -> list[RequestOutput]:
        outputs = super()._take_prepared()
        for output in outputs:
            if output.request_id in self._exports:
                self._finish(output, ())
        return [output for output in outputs if output.request_id not in self._exports]

    def _take(self, event: Event) -> None:
        match event:
            case PrefillWanted():
                self._begin(event)
            case PrefillCancelled(transfer_id) if transfer_id in self._exports:
                self._exports[transfer_id].is_over = True
                self._end_request(transfer_id)
            case Sent(transfer_id) if transfer_id in self._exports:
                self._forget(transfer_id)

    def _begin(self, order: PrefillWanted) -> None:
        next_blocks = [order.first_block] * len(self._pool.kv.groups)
        end, request = order.first_block + order.num_blocks, order.request
        self._exports[order.transfer_id] = _Export(
            next_blocks, end, num_tokens=len(request.prompt_token_ids), trace_context=request.trace_context
        )
        if self._is_draining:
            self._fail(order.transfer_id, "the prefill instance ends")
            return
        try:
            self.submit(prompt_only(order.request, order.transfer_id, super().model_info.speculation))
        except FdsdError as error:
            self._fail(order.transfer_id, error.message)

    def _fail(self, transfer_id: TransferId, reason: str) -> None:
        """Tell the connector that nothing more comes, unless it was told the end already; the request ends."""
        export = self._exports[transfer_id]
        if not export.is_over:
            export.is_over = True
            self._connector.fail(transfer_id, reason)
        self._end_request(transfer_id)

    def _forget(self, transfer_id: TransferId) -> None:
        """An order's pages are not read any more."""
        del self._exports[transfer_id]
        self._end_request(transfer_id)
        self._pool.kv.release(transfer_id)
        if self._pool.kv.states is not None:
            self._pool.kv.states.release(transfer_id)

    def _run(self, plan: SchedulerOutput) -> list[RequestOutput]:
        for new in plan.new:
            if (export := self._exports.get(new.request.request_id)) is not None:
                assert not export.has_run, f"{new.request.request_id} runs again"
                export.has_run = True
        orders = [(r, request_id) for r, request_id in enumerate(plan.request_ids) if request_id in self._exports]
        for r, transfer_id in orders:
            for part in self._pages_until(transfer_id, int(plan.num_computed_tokens[r])):
                self._send(part)
        ends = plan.num_computed_tokens + plan.num_new_tokens
        pages = [part for r, transfer_id in orders for part in self._pages_until(transfer_id, int(ends[r]))]
        pages = [part for part in pages if not self._exports[part.transfer_id].is_over]
        result, num_sent = self._execute(plan, pages)
        self._connector.note_step()
        drafts = {transfer_id: tuple(result.drafts.chains().row(r).tolist()) for r, transfer_id in orders}
        outputs = commit_result(self._pool, plan, result)
        failed = {output.request_id for output in outputs if output.error is not None}
        for part in pages:
            if part.transfer_id not in failed:
                self._send(part, num_sent)
        own = []
        for output in outputs:
            if output.request_id in self._exports:
                self._finish(output, drafts[output.request_id])
            else:
                own.append(output)
        return own

    def _give_up_preempted(self) -> None:
        """What they have sent would have to be sent again; and they hold what they would have to get."""
        for transfer_id, export in self._exports.items():
            state = self._pool.states.get(transfer_id)
            if export.has_run and state is not None and state.status is RequestStatus.WAITING:
                self._fail(transfer_id, "the prefill instance needed the memory for others")

    def _pages_until(self, transfer_id: TransferId, num_computed: int) -> list[_Pages]:
        """The blocks that are not sent and are complete with so many computed tokens; they are held, and count as sent.

        Of a window those before it are left out, which are of no use to who goes on with the prompt.
        """
        export, state, kv = self._exports[transfer_id], self._pool.states[transfer_id], self._pool.kv
        is_whole, found = num_computed == state.num_prompt_tokens, list[_Pages]()
        end = export.end_block if is_whole else min(num_computed // kv.block_size, export.end_block)
        for g, group in enumerate(kv.groups):
            begin = max(export.next_blocks[g], group.first_carried_block(state.num_prompt_tokens))
            if begin < end:
                block_ids = state.table.groups[g].block_ids[begin:end]
                kv.hold(transfer_id, block_ids)
                export.next_blocks[g] = end
                found.append(_Pages(transfer_id, g, begin, block_ids))
        if kv.states is not None and not export.has_state and num_computed >= state.num_prompt_tokens - 1:
            snapshot = kv.states.hold(transfer_id, state.table, state.num_prompt_tokens - 1)
            if snapshot is not None:
                export.has_state = True
                found.append(_Pages(transfer_id, len(kv.groups), export.end_block - 1, [snapshot]))
        return found

    def _execute(self, plan: SchedulerOutput, pages: Sequence[_Pages]) -> tuple[StepResult, int]:
        if self._layers is None or not pages:
            return self._executor.execute(plan), 0
        self._layers.begin(pages)
        try:
            result = self._executor.execute(plan)
        finally:
            num_sent = self._layers.end()
        return result, num_sent

    def _send(self, pages: _Pages, first_layer: int = 0) -> None:
        if not self._exports[pages.transfer_id].is_over:
            for layer in range(first_layer, len(self._groups)):
                self._send_layer(layer, pages)

    def _send_layer(self, layer: int, pages: _Pages) -> None:
        if self._groups[layer] == pages.group:
            self._connector.send(pages.transfer_id, layer, pages.first_block, pages.block_ids)

    def _finish(self, output: RequestOutput, drafts: tuple[int, ...]) -> None:
        transfer_id = output.request_id
        export = self._exports[transfer_id]
        if output.error is not None:
            self._fail(transfer_id, output.error[1])
        elif self._pool.kv.states is not None and not export.has_state:
            self._fail(transfer_id, "the prefill instance has no place for recurrent states")
        elif not export.is_over:
            export.is_over = True
            self._connector.finish(transfer_id, output.token_ids + (drafts if output.finish_reason is None else ()))
            self._tell(output, export)
        self._end_request(transfer_id)

    def _tell(self, output: RequestOutput, export: _Export) -> None:
        state = self._pool.states.get(output.request_id)  # None = its first token was its last
        metrics = output.metrics if state is None else state.metrics(state.first_token_time, 0.0)
        if export.trace_context and metrics is not None:
            self.trace(export.trace_context, metrics, export.num_tokens, output.num_cached_tokens)

    def _end_request(self, transfer_id: TransferId) -> None:
        self.abort([transfer_id], FinishReason.LENGTH)
