"""Who guessed the tokens of a text: the runs of each step with their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.types import StepSources


@dataclass(frozen=True, slots=True)
class SourceRun:
    """Neighbouring tokens of one source.

    Attributes:
        source: see StepSources.
        text: of these tokens before any stop cut, also where an answer leaves it out: marks of thinking and calls.
    """

    source: str
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class StepText:
    """The tokens that one step added; `drafted`: see StepSources."""

    runs: tuple[SourceRun, ...]
    drafted: dict[str, int]


def step_texts(sources: StepSources, texts: Sequence[str], num_tokens: int) -> tuple[StepText, ...]:
    """Return the runs of a step of which `num_tokens` remain, none where it has none.

    `texts`: of the tokens, one each; more after the last one belongs to it.
    """
    runs, begin = list[SourceRun](), 0
    for source, length in sources.runs:
        end = min(begin + length, num_tokens)
        own = texts[begin : end if end < num_tokens else None]
        if begin < end:
            runs.append(SourceRun(source, end - begin, "".join(own)))
        begin = end
    return (StepText(tuple(runs), sources.drafted),) if runs else ()
