"""One instance as the router sees it: what it said, what it was given, and whether it fails. Knows no socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.cluster.messages import Clock, Registration
from fastdeploy_sd.cluster.placement import Candidate
from fastdeploy_sd.types import KvSource
from fastdeploy_sd.wire.http_client import Exchange, Target

_MAX_FAILURES = 3
_FIRST_BACKOFF_S = 2.0
_MAX_BACKOFF_S = 60.0


def _monotonic() -> float:
    return time.monotonic()


class Circuit:
    """Keeps requests from an instance that fails: after some failures in a row it backs off, longer each time.

    After a backoff one request may try; its success ends the matter, its failure begins the next backoff.
    """

    def __init__(self, now: Callable[[], float] = _monotonic) -> None:
        self._now = now
        self._num_failures = 0
        self._backoff_until = 0.0
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether the instance gets nothing now."""
        return self._num_failures >= _MAX_FAILURES and (self._is_trying or self._now() < self._backoff_until)

    def begin(self) -> None:
        self._is_trying = self._num_failures >= _MAX_FAILURES

    def note(self, is_failure: bool) -> None:
        """A request of it has come to something, good or bad."""
        self._is_trying = False
        self._num_failures = self._num_failures + 1 if is_failure else 0
        num_backoffs = self._num_failures - _MAX_FAILURES
        if num_backoffs >= 0:
            self._backoff_until = self._now() + min(_FIRST_BACKOFF_S * 2 ** min(num_backoffs, 10), _MAX_BACKOFF_S)

    def leave(self) -> None:
        """A request of it was given up by its client, which says nothing."""
        self._is_trying = False


class Instance:
    """A registered instance; `exchanges` are the requests it is answering, to be aborted when it is lost.

    `now` is the router's monotonic clock.
    """

    def __init__(self, said: Registration, session: str, seen_host: str, now: Callable[[], float] = _monotonic) -> None:
        self._now = now
        self.circuit = Circuit(now)
        self.is_paused = False  # by an operator of the router
        self.exchanges: set[Exchange] = set()
        self._candidate: Candidate | None = None
        self._num_given = 0  # requests of ours that have not ended
        self.renew(said, session, seen_host)

    def renew(self, said: Registration, session: str, seen_host: str) -> None:
        """Take its registration; the arguments are those of the constructor."""
        self.said, self.member = said, said.member
        self.session = session
        self.number = 0
        self.target = Target(said.host or seen_host, said.port)
        self._seen_host = seen_host
        self.report(said.load, said.clock)

    def report(self, load: InstanceLoad, clock: Clock) -> None:
        self.load = load
        self._clock_then = clock
        self.last_seen = self._now()
        self._num_given_then = self._num_given  # when it said so
        self._candidate = None

    def begin(self) -> None:
        self._num_given += 1
        self._candidate = None

    def end(self) -> None:
        self._num_given -= 1
        self._candidate = None

    @property
    def num_given(self) -> int:
        """Requests that it was given and that have not ended."""
        return self._num_given

    @property
    def instance_id(self) -> str:
        return self.member.instance_id

    @property
    def label(self) -> str:
        """What metrics call it."""
        engine = self.member.engine
        return str(self.target) if engine is None else f"{self.target} engine {engine}"

    @property
    def clock(self) -> Clock:
        """Its clocks, which have run on since its last message."""
        silence_s = self.silence_s
        return Clock(self._clock_then.monotonic + silence_s, self._clock_then.wall + silence_s)

    @property
    def silence_s(self) -> float:
        return self._now() - self.last_seen

    @property
    def kv_source(self) -> KvSource | None:
        """Where it takes orders to compute KV, None when it takes none."""
        if not self.member.computes_kv:
            return None
        scheme, _, place = self.member.kv_address.partition("://")
        listener = Target.parse(place)
        return KvSource(self.instance_id, f"{scheme}://{Target(listener.host or self._seen_host, listener.port)}")

    def may_take(self, silent_s: float) -> bool:
        """Whether it gets new requests."""
        is_able = self.load.takes_requests and self.silence_s < silent_s and not self.circuit.is_open
        return is_able and not self.is_paused

    def candidate(self) -> Candidate:
        """Return it with what it has to do: what it reported, and what it was given since."""
        if self._candidate is None:  # every request asks for that of every instance
            self._candidate = self._counted()
        return self._candidate

    def _counted(self) -> Candidate:
        waiting = self.load.num_waiting + max(self._num_given - self._num_given_then, 0)
        missing = max(self._num_given - self.load.num_running - waiting, 0)
        return Candidate(self.member, replace(self.load, num_waiting=waiting + missing))
