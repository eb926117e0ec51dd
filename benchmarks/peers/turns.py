"""Who is measured when: every round gives each peer one turn, in an order that rotates, and only its program runs.

A peer that fails is out of the cases at hand; the reason stays in their records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.peers.process import PeerError, Process
from benchmarks.peers.results import Case
from fastdeploy_sd.errors import FdsdError


class Turns:
    """The peers' turns in one or several cases that are measured together.

    Args:
        processes: who takes turns, all of them paused; usually a peer's name is the key.
        cases: under the same keys, what each is measured in; a failure marks all of its own.
        on_round: called before every round; measures the machine.
    """

    def __init__(
        self, processes: Mapping[str, Process], cases: Mapping[str, Sequence[Case]], on_round: Callable[[], None]
    ) -> None:
        self._processes, self._cases, self._on_round = processes, cases, on_round

    def once(self, act: Callable[[str], object], first: int = 0) -> None:
        """Call `act` with every key that has not failed, its program running, from the `first` one on."""
        keys = list(self._processes)
        shift = first % len(keys) if keys else 0
        for key in [*keys[shift:], *keys[:shift]]:
            if all(case.failed is None for case in self._cases[key]):
                self._turn(key, act)

    def rounds(self, count: int, act: Callable[[str], object]) -> None:
        """The same `count` times, the machine measured before each."""
        for turn in range(count):
            self._on_round()
            self.once(act, turn)

    def _turn(self, key: str, act: Callable[[str], object]) -> None:
        self._processes[key].resume()
        try:
            act(key)
        except FdsdError as error:
            for case in self._cases[key]:
                case.failed = error.message
        finally:
            self._processes[key].pause()


def verify_tokens(got: list[int], expected: list[int]) -> None:
    """Refuse a figure of a model that computes something else.

    Raises:
        PeerError: the tokens are not those of the count.
    """
    if got != expected:
        raise PeerError(f"tokens: expected {expected[:8]}, got {got[:8]}")
