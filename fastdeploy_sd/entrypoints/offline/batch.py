"""Drives an engine in this process until some requests have ended. Knows no prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from fastdeploy_sd.entrypoints.offline.conversations import AnswerReader
from fastdeploy_sd.entrypoints.offline.interrupt import DeferredInterrupt
from fastdeploy_sd.entrypoints.offline.progress import TokenProgress
from fastdeploy_sd.errors import Overloaded
from fastdeploy_sd.text.output_processor import Completion, CompletionCollector, OutputProcessor
from fastdeploy_sd.text.request_builder import RequestGroup
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import FinishReason, Request, RequestId, RequestOutput
from fastdeploy_sd.types.stats import EngineStats

# So often an interrupt is looked for while KV is on its way.
_KV_POLL_S = 0.2


class SteppedEngine(Protocol):
    """What is used of `engine.engine.Engine`, which says what each does."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = ...) -> list[RequestOutput]: ...

    def step(self) -> list[RequestOutput]: ...

    def wait_for_arrival(self, timeout_s: float) -> None: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One request on its way."""

    request: Request
    processor: OutputProcessor
    collector: CompletionCollector


class OfflineBatch:
    """Drives the engine until all requests have ended. `failure` tells what a step raised, if one did."""

    def __init__(
        self,
        engine: SteppedEngine,
        tokenizer: Tokenizer,
        groups: Iterable[RequestGroup],
        readers: Iterable[AnswerReader],
    ) -> None:
        """Begin nothing yet; there is a reader of the completions of each group."""
        self._engine = engine
        self._sequences = {
            r.request_id: _Sequence(r, reader.processor(r, tokenizer), CompletionCollector(index))
            for group, reader in zip(groups, readers, strict=True)
            for index, r in enumerate(group)
        }
        self._waiting = deque(self._sequences.values())
        self._running: set[str] = set()
        self.failure: str | None = None

    def run(self, use_tqdm: bool) -> None:
        """Submit as the queue takes them and step; abort everything when interrupted or when a request fails."""
        try:
            requests = [sequence.request for sequence in self._waiting]
            progress = TokenProgress(requests, self._engine.stats, is_wanted=use_tqdm)
            with DeferredInterrupt() as interrupt, progress:
                while self._waiting or self._running:
                    self._submit()
                    for output in self._step():
                        self._take(output, progress)
                    interrupt.raise_pending()
        finally:
            if self.failure is None:
                self._engine.abort(self._running)

    def _step(self) -> list[RequestOutput]:
        try:
            outputs = self._engine.step()
            self._engine.wait_for_arrival(_KV_POLL_S)
            return outputs
        except BaseException as error:  # an interrupt, too, leaves the engine half updated
            self.failure = repr(error)
            raise

    def completions_of(self, requests: Iterable[Request]) -> list[Completion]:
        """Return what became of some of the requests; only valid after `run`."""
        return [self._sequences[request.request_id].collector.build() for request in requests]

    def _submit(self) -> None:
        while self._waiting:
            try:
                self._engine.submit(self._waiting[0].request)
            except Overloaded:
                return  # the rest follows when the queue has room
            self._running.add(self._waiting.popleft().request.request_id)

    def _take(self, output: RequestOutput, progress: TokenProgress) -> None:
        """Add an output to its sequence."""
        if output.request_id not in self._running:
            return
        sequence = self._sequences[output.request_id]
        if output.finish_reason is not None:
            self._running.remove(output.request_id)
        delta = sequence.processor.process(output)
        if delta.needs_abort:
            self._running.remove(output.request_id)
            [last] = self._engine.abort([output.request_id], FinishReason.STOP)
            delta = replace(delta, metrics=last.metrics or delta.metrics)
        sequence.collector.add(delta)
        progress.add(output.request_id, len(output.token_ids), is_last=delta.finish_reason is not None)
