"""Which instance takes a request: a pure choice over the instances' loads. Knows no network and no request."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# An instance that is preferred, because it has the prompt's prefix or the client's connection, is taken while it is
# fuller than the emptiest by no more than this share of what it runs at once.
PREFERENCE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance has to do.

    Attributes:
        num_running, num_waiting: its requests, with those that were sent to it and that it may not know yet.
        capacity: requests it runs at once, at least 1.
    """

    num_running: int
    num_waiting: int
    capacity: int

    @property
    def share(self) -> float:
        """Requests per place: below 1 a request runs at once."""
        return (self.num_running + self.num_waiting) / self.capacity


def choose(loads: Mapping[str, Load], preferred: Sequence[str] = (), rng: random.Random | None = None) -> str | None:
    """Return the instance that takes the next request; None = there is none.

    The emptiest does, by share, and one of them at random when several are. The first of the preferred ones that is
    hardly fuller than that takes its place.

    Args:
        loads: instance -> its load; of the instances that may take the request.
        preferred: instances by preference; those that are not in `loads` are passed over.
        rng: breaks ties; None = the module's own.
    """
    if not loads:
        return None
    least = min(load.share for load in loads.values())
    for name in preferred:
        if name in loads and loads[name].share <= least + PREFERENCE:
            return name
    emptiest = sorted(name for name, load in loads.items() if load.share == least)
    return (rng or random).choice(emptiest)
