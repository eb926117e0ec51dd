"""Measures several drafting settings beside plain decoding in one run: the same requests, one setting after another.

All settings make the same tokens, so what counts is how long each of them takes to make them all. Up to the first end,
or without some of the steps, they would be compared over different parts of the texts: a setting that drafts long
chains where a text repeats itself has requests that end early, and few steps there. Knows no files and no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from benchmarks.offline_run import Sample, Timeline, acceptance, phase_ms, run_requests
from benchmarks.prompts import REPEATED
from benchmarks.speculation_run import Case
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import Request
from fastdeploy_sd.types.draft_methods import NAIVE


@dataclass(frozen=True, slots=True)
class Turns:
    """How a case is run.

    Attributes:
        temperature: of sampling; every request has a seed of its own. 0 = greedy.
        clock: seconds; None = time.perf_counter.
    """

    temperature: float
    clock: Callable[[], float] | None = None


def run_in_turns(engines: Mapping[str, Engine], case: Case, turns: Turns, repeat: int) -> dict[str, Sample]:
    """Run a case once in every engine, and return what the steps took from all first tokens to the last end.

    Args:
        engines: by setting, idle; one of them NAIVE. Who is first changes from repeat to repeat.

    Raises:
        InternalError: a request failed.
    """
    names = list(engines)
    shift = repeat % len(names)
    samples = {}
    for name in (*names[shift:], *names[:shift]):
        if case.workload == REPEATED:
            run_requests(engines[name], _requests(case, turns, repeat, number=1))
        line = Timeline(engines[name], _requests(case, turns, repeat), turns.clock, to_last_end=True)
        samples[name] = line.run()
    return {name: samples[name] for name in names}


def _requests(case: Case, turns: Turns, repeat: int, number: int = 0) -> list[Request]:
    requests = case.requests(repeat, number)
    return [replace(r, sampling=replace(r.sampling, temperature=turns.temperature)) for r in requests]


def cell_metrics(
    repeats: Sequence[Mapping[str, Sample]], fixed: Collection[str], neither: Collection[str] = ()
) -> dict[str, Any]:
    """Return what a row of the table needs.

    Args:
        repeats: results of `run_in_turns`, at least one.
        fixed: the settings that the others are compared with, NAIVE among them.
        neither: settings that are not compared.

    Returns:
        settings: name -> its numbers; `speed_up` is the median over the repeats of its rate over plain decoding's in
        the same repeat. best: the fastest of the fixed settings. over_best: every other setting -> its rate over the
        best one's, the median over the repeats; see `_best_elsewhere`.
    """
    settings = {name: _setting_metrics(repeats, name) for name in repeats[0]}
    best = _best(repeats, fixed)
    others = [name for name in settings if name not in fixed and name not in neither]
    pairs = list(zip(repeats, _best_elsewhere(repeats, fixed), strict=True))
    return {
        "settings": settings,
        "best": best,
        "over_best": {
            name: median(r[name].tokens_per_s / r[rival].tokens_per_s for r, rival in pairs) for name in others
        },
        "has_same_tokens": all(sample.token_ids == r[NAIVE].token_ids for r in repeats for sample in r.values()),
    }


def _best(repeats: Sequence[Mapping[str, Sample]], fixed: Collection[str]) -> str:
    """Return which of the fixed settings was the fastest."""
    return max((name for name in repeats[0] if name in fixed), key=lambda name: _speed_up(repeats, name))


def _best_elsewhere(repeats: Sequence[Mapping[str, Sample]], fixed: Collection[str]) -> list[str]:
    """Return for every repeat which of the fixed settings was the fastest in all the others.

    The fastest of several that hardly differ is the luckiest: in the repeat that it was chosen in it seems faster than
    it is. A single repeat has no others, and stands for itself.
    """
    return [_best([*repeats[:i], *repeats[i + 1 :]] or repeats, fixed) for i in range(len(repeats))]


def _speed_up(repeats: Sequence[Mapping[str, Sample]], name: str) -> float:
    return median(repeat[name].tokens_per_s / repeat[NAIVE].tokens_per_s for repeat in repeats)


def _setting_metrics(repeats: Sequence[Mapping[str, Sample]], name: str) -> dict[str, Any]:
    samples = [repeat[name] for repeat in repeats]
    speed_ups = [repeat[name].tokens_per_s / repeat[NAIVE].tokens_per_s for repeat in repeats]
    accepted = [acceptance(sample.window_stats) for sample in samples]
    rates = [rate for rate, _ in accepted if rate is not None]
    phases = [phase_ms(sample.window_stats) for sample in samples]
    num_steps = mean(len(sample.window_steps_s) for sample in samples)
    return {
        "speed_up": _speed_up(repeats, name),
        "speed_up_min": min(speed_ups),
        "speed_up_max": max(speed_ups),
        "tokens_per_s": median(sample.tokens_per_s for sample in samples),
        "tokens_per_step": mean(map(_tokens_per_step, samples)),
        "acceptance_length": mean(length for _, length in accepted),
        "acceptance_rate": mean(rates) if rates else None,
        "num_steps": num_steps,
        "num_drafts": mean(_num_drafts(sample) for sample in samples),
        "step_ms": mean(1e3 * sum(sample.window_steps_s) for sample in samples) / num_steps,
        **{phase: mean(p[phase] for p in phases) for phase in phases[0]},
    }


def _tokens_per_step(sample: Sample) -> float:
    """Mean tokens of a request in a step behind that of its first one."""
    num_tokens = sum(map(len, sample.token_ids.values())) - len(sample.token_ids)
    return num_tokens / len(sample.gaps_s)


def _num_drafts(sample: Sample) -> int:
    """Drafts that were verified."""
    begin, end = sample.window_stats
    return end.num_draft_tokens - begin.num_draft_tokens
