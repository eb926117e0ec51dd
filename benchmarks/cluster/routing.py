"""A simulated router: the product's Chooser over what instances reported, with its own placement or another policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.cluster.messages import Clock, Registration
from fastdeploy_sd.cluster.placement import PrefixTable, choose
from fastdeploy_sd.cluster.router.choice import Chooser, Placement, RoutingHints
from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.cluster.router.options import RoutingConfig
from fastdeploy_sd.types import I32


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


class SimulatedRouter:
    """Where requests go, by what the members' heartbeats said; `now` is the simulation's clock."""

    def __init__(self, table: PrefixTable, config: RoutingConfig, now: Callable[[], float]) -> None:
        self._config, self._now = config, now
        self._instances: dict[str, Instance] = {}
        self._chooser = Chooser(self._available, lambda: [*self._instances.values()][:1], table)
        self.num_choices = 0

    def register(self, place: str, member: Member, load: InstanceLoad) -> None:
        """A member has been started at a place, where another one may have been before."""
        said = Registration("", member, "", 1, ("simulated",), 0, load, Clock(self._now(), 0.0))
        self._instances[place] = Instance(said, "", place, self._now)

    def report(self, place: str, load: InstanceLoad) -> None:
        self._instances[place].report(load, Clock(self._now(), 0.0))

    def hints(self, prompt: I32) -> RoutingHints:
        return self._chooser.hints(b'{"prompt": "' + prompt.tobytes())

    def choose(self, hints: RoutingHints) -> Placement | None:
        self.num_choices += 1
        return self._chooser.choose(hints)

    def _available(self) -> list[Instance]:
        return [i for i in self._instances.values() if i.may_take(self._config.silent_s)]
