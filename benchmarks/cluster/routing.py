"""A simulated router: the product's Chooser over what instances reported, with its own placement or another policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.cluster.messages import Clock, Registration
from fastdeploy_sd.cluster.placement import Candidate, PrefixTable, choose
from fastdeploy_sd.cluster.router.choice import Chooser, Placement, RoutingHints
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import RoutingConfig
from fastdeploy_sd.types import I32

_ON_ITS_WAY_S = 0.1  # as in cluster/redis/cluster.py


class _Random(PrefixTable):
    """Any instance, with equal chances."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_entries=0)
        self._any = rng

    def choose(self, loads: Mapping[str, InstanceLoad], keys: Sequence[bytes], home: str | None = None) -> str | None:
        return self._any.choice(list(loads)) if loads else None


class _RoundRobin(PrefixTable):
    """One after the other."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_entries=0)
        self._turn = count(rng.randrange(1 << 16))

    def choose(self, loads: Mapping[str, InstanceLoad], keys: Sequence[bytes], home: str | None = None) -> str | None:
        return list(loads)[next(self._turn) % len(loads)] if loads else None


class _PowerOfTwo(PrefixTable):
    """The emptier one of two that are drawn."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_entries=0)
        self._any = rng

    def choose(self, loads: Mapping[str, InstanceLoad], keys: Sequence[bytes], home: str | None = None) -> str | None:
        drawn = self._any.sample(list(loads), min(2, len(loads)))
        return min(drawn, key=lambda name: loads[name].share, default=None)


class _LeastRequests(PrefixTable):
    """The emptiest, whatever it has seen."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_entries=0)
        self._any = rng

    def choose(self, loads: Mapping[str, InstanceLoad], keys: Sequence[bytes], home: str | None = None) -> str | None:
        return choose(loads, (), self._any)


OURS = "load+prefix"
POLICIES: Mapping[str, Callable[[random.Random], PrefixTable]] = {
    OURS: lambda rng: PrefixTable(rng=rng),
    "least-requests": _LeastRequests,
    "power-of-two": _PowerOfTwo,
    "round-robin": _RoundRobin,
    "random": _Random,
}


def table_of(policy: str, preference: float, max_entries: int, rng: random.Random) -> PrefixTable:
    """Return what places requests; the numbers are for the product's own policy only."""
    return PrefixTable(max_entries, rng, preference) if policy == OURS else POLICIES[policy](rng)


class Front(Protocol):
    """What clients send requests to."""

    def hints(self, prompt: I32) -> RoutingHints:
        """Return what matters of a request."""

    def choose(self, hints: RoutingHints) -> Placement | None:
        """Return where it goes now; None = no instance can take it."""


class SimulatedRouter:
    """Where requests go, by what the members' heartbeats said; `now` is the simulation's clock."""

    def __init__(self, table: PrefixTable, config: RoutingConfig, now: Callable[[], float]) -> None:
        self._config, self._now = config, now
        self._instances: dict[str, Instance] = {}
        self._chooser = Chooser(self.available, lambda: [*self._instances.values()][:1], table)

    def register(self, place: str, member: Member, load: InstanceLoad) -> None:
        """A member has been started at a place, where another one may have been before."""
        said = Registration("", member, "", 1, ("simulated",), 0, load, Clock(self._now(), 0.0))
        self._instances[place] = Instance(said, "", place, self._now)

    def report(self, place: str, load: InstanceLoad) -> None:
        self._instances[place].report(load, Clock(self._now(), 0.0))

    def hints(self, prompt: I32) -> RoutingHints:
        return self._chooser.hints(b'{"prompt": "' + prompt.tobytes())

    def choose(self, hints: RoutingHints) -> Placement | None:
        return self._chooser.choose(hints)

    def available(self) -> list[Instance]:
        return [i for i in self._instances.values() if i.may_take(self._config.silent_s)]


class RedisFront:
    """A server that places its clients' requests by the records in Redis, its own engine first among equals.

    `records` has what all instances wrote; the rule for requests on their way is that of ClusterView.
    """

    def __init__(self, place: str, table: PrefixTable, records: SimulatedRouter, now: Callable[[], float]) -> None:
        self.place = place
        self._table, self._records, self._now = table, records, now
        self._assigned: dict[str, list[float]] = {}

    def hints(self, prompt: I32) -> RoutingHints:
        return RoutingHints(self._table.keys_of(prompt.tobytes()))

    def choose(self, hints: RoutingHints) -> Placement | None:
        by_name = {i.instance_id: i for i in self._records.available()}
        candidates = {name: self._candidate(name, i) for name, i in by_name.items()}
        able = {name: of for name, of in candidates.items() if of.member.generates}
        able = {name: of for name, of in able.items() if name not in hints.tried} or able
        home = next((name for name in able if name.partition("#")[0] == self.place), None)
        placed = self._table.place(able, candidates, hints.keys, home)
        if placed is None:
            return None
        name, source = placed
        for given in (name, source):
            if given is not None:
                self._assigned.setdefault(given, []).append(self._now())
        return Placement(by_name[name], None if source is None else by_name[source])

    def _candidate(self, name: str, instance: Instance) -> Candidate:
        """The instance with the requests that it was given here and its record need not count."""
        times = self._assigned.get(name)
        if times:
            times = self._assigned[name] = [when for when in times if when > instance.last_seen - _ON_ITS_WAY_S]
        load = instance.load
        return Candidate(instance.member, replace(load, num_waiting=load.num_waiting + len(times)) if times else load)
