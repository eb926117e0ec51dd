"""Compiles grammars to matchers in a thread below the priority of the steps', and caches them."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.process.background import lower_priority
from fastdeploy_sd.text.guidance.limits import library_error, limits_of
from fastdeploy_sd.types import RequestId
from fastdeploy_sd.types.stats import GrammarStats

# Compiled grammars that no request uses, kept for the next one that brings the same text.
_MAX_IDLE = 64
_CLOSE_TIMEOUT_S = 10.0
# The library recurses into grammars. More than the stack on which they were checked: what passed there passes here.
_STACK_BYTES = 64 << 20
_STACK_SIZE = threading.Lock()  # it is set for all threads that are started meanwhile


@dataclass(slots=True)
class _Entry:
    """A grammar that requests use or have used; its matcher is in the state before the first token."""

    num_users: int = 0
    matcher: LLMatcher | None = None
    error: str = ""


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread in which grammars can be compiled."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class GrammarStore:
    """Compiles grammars and hands out matchers; see interfaces.grammars.Grammars. Close it at the end.

    A grammar is kept from the `prepare` of its first request to the `release` of the last, and then while it is among
    the `max_idle` last used. At most `max_used` are compiled for requests; it must be at least the running requests.
    `fd` is readable while `take_prepared` or `take_masked` has something to return.
    """

    def __init__(
        self,
        vocabulary: LLTokenizer,
        max_used: int = 512,
        max_idle: int = _MAX_IDLE,
        limits: LLParserLimits | None = None,
    ) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._max_used, self._max_idle = max_used, max_idle
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # compiled, without users; the longest unused first
        self._queue: OrderedDict[str, None] = OrderedDict()  # to compile; each has users
        self._num_used = 0  # compiled, with users
        self._prepared: list[str] = []
        self._masked: list[RequestId] = []
        self._stats = GrammarStats()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def prepare(self, grammar: str) -> None:
        """Hold a grammar for one more request; it is compiled if no request holds it. `release` ends that."""
        with self._changed:
            entry = self._entries.get(grammar)
            if entry is not None:
                self._count(num_reused=1)
            if entry is None:
                entry = self._entries[grammar] = _Entry()
                self._queue[grammar] = None
                if self._thread is None and not self._is_closed:
                    self._thread = start_thread(self._run, "fdsd-grammars")
                self._changed.notify()
            elif grammar in self._idle:
                del self._idle[grammar]
                self._num_used += 1
            entry.num_users += 1

    def release(self, grammar: str) -> None:
        """End what one `prepare` began."""
        with self._changed:
            entry = self._entries[grammar]
            entry.num_users -= 1
            if entry.num_users:
                return
            if entry.matcher is None:
                self._queue.pop(grammar, None)  # no request waits for it; the thread may be compiling it
                del self._entries[grammar]
                return
            self._num_used -= 1
            self._idle[grammar] = None
            while len(self._idle) > self._max_idle:
                oldest, _ = self._idle.popitem(last=False)
                del self._entries[oldest]
            self._changed.notify()

    def is_ready(self, grammar: str) -> bool:
        """Whether a prepared grammar has been compiled."""
        return self._entries[grammar].matcher is not None

    def error_of(self, grammar: str) -> str:
        """Return why a prepared grammar cannot be compiled; "" = it can, or it is not known yet."""
        return self._entries[grammar].error

    def take_prepared(self) -> list[str]:
        """Return, once each, the grammars that have become ready or failed since the last call."""
        if not self._prepared:  # asked in every step
            return []
        with self._changed:
            prepared, self._prepared = self._prepared, []
            self._quieten()
        return prepared

    def announce(self, request_id: RequestId) -> None:
        """Say of a request that its next mask has been computed. Any thread may call it."""
        with self._changed:
            if not self._is_closed:
                self._masked.append(request_id)
                os.eventfd_write(self.fd, 1)

    def take_masked(self) -> list[RequestId]:
        """Return the requests that were announced since the last call."""
        if not self._masked:
            return []
        with self._changed:
            masked, self._masked = self._masked, []
            self._quieten()
        return masked

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a request's own matcher before the first token; raises InternalError if the grammar is not ready."""
        entry = self._entries.get(grammar)
        if entry is None or entry.matcher is None:
            raise InternalError("a grammar was asked for before it was ready")
        return entry.matcher.deep_copy()

    def renewed(self, grammar: str) -> LLMatcher:
        """Return a matcher compiled anew at once; from now on the others are copies of it. Raises InternalError.

        Matchers of a grammar share automata of limited size. For threads of `start_thread`.
        """
        matcher, error = self._compile(grammar)
        entry = self._entries.get(grammar)
        if matcher is None or entry is None or entry.matcher is None:
            raise InternalError(error or "a grammar was asked for before it was ready")
        with self._changed:
            entry.matcher = matcher
        return matcher.deep_copy()

    def stats(self) -> GrammarStats:
        """Return what has been compiled so far."""
        with self._changed:
            return replace(self._stats, num_kept=self._num_used + len(self._idle))

    def close(self) -> None:
        """End the thread; a grammar that it is compiling is finished first. May be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        os.close(self.fd)

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._queue and self._num_used < self._max_used))
                if self._is_closed:
                    return
                grammar, _ = self._queue.popitem(last=False)
                entry = self._entries[grammar]
            begin = time.perf_counter()
            matcher, error = self._compile(grammar)
            with self._changed:
                self._count(num_compiled=not error, num_failed=bool(error), compile_s=time.perf_counter() - begin)
                self._enter(grammar, entry, matcher, error)

    def _compile(self, grammar: str) -> tuple[LLMatcher | None, str]:
        try:
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits or limits_of(grammar))
            matcher.compute_bitmask()  # what the first one builds, every request's matcher has then
            matcher.deep_copy().compute_ff_tokens()
            return (None, library_error(matcher.get_error())) if matcher.is_error() else (matcher, "")
        except Exception as error:  # the library promises that it raises none
            return None, library_error(str(error)) or repr(error)

    def _enter(self, grammar: str, entry: _Entry, matcher: LLMatcher | None, error: str) -> None:
        if self._is_closed or self._entries.get(grammar) is not entry:
            return  # no request waits any more
        entry.matcher, entry.error = matcher, error
        self._num_used += matcher is not None
        self._prepared.append(grammar)
        os.eventfd_write(self.fd, 1)

    def count(self, **more: float) -> None:
        """Add to attributes of `stats`. Any thread may call it."""
        with self._changed:
            self._count(**more)

    def _quieten(self) -> None:
        if not (self._prepared or self._masked):
            os.eventfd_read(self.fd)

    def _count(self, **more: float) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})
