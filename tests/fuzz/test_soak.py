"""The soak for a quarter of a minute, and that it finds what it is there to find."""

from __future__ import annotations

import pytest

from tests.fuzz.soak import soak
from tests.fuzz.soak_load import Load, make_asks
from tests.server.answers import Answer, Choice

pytestmark = pytest.mark.long


def test_nothing_is_lost_while_processes_die_and_hang() -> None:
    run = soak(seed=12, seconds=15, period_s=2.5, num_asks=20)
    print(run.report())
    assert run.load.findings == []
    assert run.faults, "nothing happened"
    assert run.load.outcomes["right"] > 10, "few requests ended well"


class Still:
    """A door that nothing is done to."""

    name, url = "still", "http://still"

    def was_disturbed(self, begin: float, end: float) -> bool:
        return False


def said(text: str, **fields: object) -> Answer:
    """A complete answer of one choice."""
    answer = Answer(200, {0: Choice(text, [1, 2], {"tokens": [text]}, ["length", None])}, [3, 2], is_done=True)
    for name, value in fields.items():
        setattr(answer, name, value)
    return answer


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (said("ab"), "right"),
        (said("ax"), "WRONG"),
        (said("ab", usage=[3, 1]), "WRONG"),
        (said("ab", choices={}), "WRONG"),
        (Answer(200, {0: Choice("x")}, broken="cut off"), "WRONG"),
        (Answer(200, {0: Choice("a")}, broken="cut off"), "CUT OFF"),
        (Answer(200, {0: Choice("a")}, broken="left"), "left"),
        (Answer(200, {0: Choice("a")}, broken="no end"), "LOST"),
        (Answer(503, error={"type": "service_unavailable_error", "code": "c"}, is_done=True),
         "error service_unavailable_error c"),
        (Answer(500, error={"type": "internal_error", "code": None}, is_done=True),
         "UNEXPECTED error internal_error None"),
    ],
)  # fmt: skip
def test_an_end_is_called_what_it_is(answer: Answer, outcome: str) -> None:
    load = Load(make_asks(0, 1), [Still()], seed=0, expected={0: said("ab")})
    load.judge(load.asks[0], answer, Still(), 0.0)
    assert dict(load.outcomes) == {outcome: 1}
    assert bool(load.findings) == outcome.split(maxsplit=1)[0].isupper()
