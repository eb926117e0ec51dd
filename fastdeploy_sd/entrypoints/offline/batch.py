"""Drives an engine in this process until some requests have ended. Knows no prompt."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Protocol, Self

from tqdm import tqdm

from fastdeploy_sd.entrypoints.offline.conversations import AnswerReader
from fastdeploy_sd.errors import Overloaded
from fastdeploy_sd.text.output_processor import Completion, CompletionCollector, OutputProcessor
from fastdeploy_sd.text.request_builder import RequestGroup
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import FinishReason, Request, RequestId, RequestOutput
from fastdeploy_sd.types.stats import EngineStats

_REFRESH_S = 0.5


class TokenProgress:
    """Counts tokens of sequences that run side by side. Tokens that a sequence ends without are taken off the total.

    `is_wanted`: False = nothing is shown; else it is if standard error is a terminal.
    """

    def __init__(self, requests: Iterable[Request], stats: Callable[[], EngineStats], *, is_wanted: bool) -> None:
        self._left = {request.request_id: request.max_tokens for request in requests}
        self._num_sequences, self._total = len(self._left), sum(self._left.values())
        self._stats = stats
        # disable=None: no bar unless standard error is a terminal.
        disable = None if is_wanted else True
        self._bar = tqdm(total=self._total, desc="generating", unit="tok", disable=disable)
        self._before = EngineStats() if self._bar.disable else stats()
        self._next_look = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:
            self._describe()
        self._bar.close()

    def add(self, request_id: RequestId, num_tokens: int, *, is_last: bool) -> None:
        """Count what a step gave a sequence."""
        self._left[request_id] -= num_tokens
        if is_last:
            self._total -= self._left.pop(request_id)
            self._bar.total = self._total
        if self._bar.disable:
            return
        if time.monotonic() >= self._next_look:
            self._describe()
            self._next_look = time.monotonic() + _REFRESH_S
        self._bar.update(num_tokens)

    def _describe(self) -> None:
        parts = [f"{self._num_sequences - len(self._left)}/{self._num_sequences} done"]
        now, before = self._stats(), self._before
        num_verified = now.num_draft_tokens - before.num_draft_tokens
        if num_verified:
            num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
            parts.append(f"{num_accepted / num_verified:.0%} of drafts accepted")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)


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


class DeferredInterrupt:
    """Within the `with` block SIGINT is only noted; `raise_pending` turns it into KeyboardInterrupt.

    A second SIGINT raises at once, for a step that hangs; the engine is to be given up then. Outside the main thread,
    where Python delivers no signals, and where the program has its own SIGINT handler, it does nothing.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if SIGINT came since the last call."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
