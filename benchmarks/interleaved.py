"""Measures several drafting settings beside plain decoding in one run: the same requests, a few tokens of each in turn.

A machine's speed changes from one second to the next, and all settings share what it is: every turn takes each of them
on by the same number of tokens, so that a turn's times are comparable however many steps it took. Knows no files and no
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from benchmarks.offline_run import Sample, Timeline, acceptance, phase_ms, run_requests
from benchmarks.prompts import REPEATED
from benchmarks.speculation_run import Case
from fastdeploy_sd.draft_methods import NAIVE
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import Request

_MIN_STEPS = 2
# A step of a window, all of which run the same requests, takes no more times as long as the median one by itself.
_DISTURBED = 4.0


@dataclass(frozen=True, slots=True)
class Turns:
    """How a case is run.

    Attributes:
        temperature: of sampling; every request has a seed of its own. 0 = greedy.
        num_tokens: of every request and turn, >= 1.
        clock: seconds; None = time.perf_counter.
    """

    temperature: float
    num_tokens: int
    clock: Callable[[], float] | None = None


def run_in_turns(engines: Mapping[str, Engine], case: Case, turns: Turns, repeat: int) -> dict[str, Sample]:
    """Run a case once in every engine and return what each one's decode window took.

    The first step of a turn is not counted: it finds the caches full of another engine's weights.

    Args:
        engines: by setting, idle; one of them NAIVE. Who is first changes from turn to turn.

    Raises:
        ConfigError: the requests are so short that no step of an engine counts.
        InternalError: a request failed.
    """
    if case.workload == REPEATED:
        for engine in engines.values():
            run_requests(engine, _requests(case, turns, repeat, number=1))
    lines = {name: Timeline(engine, _requests(case, turns, repeat), turns.clock) for name, engine in engines.items()}
    for line in lines.values():
        while not line.has_begun:
            line.step()
    aims = {name: line.num_tokens for name, line in lines.items()}
    names, turn = list(lines), repeat
    while any(line.is_in_window for line in lines.values()):
        shift = turn % len(names)
        for name in (*names[shift:], *names[:shift]):
            aims[name] += turns.num_tokens * case.batch
            _take_turn(lines[name], aims[name])
        turn += 1
    samples = {name: line.run() for name, line in lines.items()}
    for name, sample in samples.items():
        if not sample.window_steps_s:
            raise ConfigError(f"output_len: expected more tokens, got {case.output_len}, two steps of {name}")
    return samples


def _take_turn(line: Timeline, aim: int) -> None:
    """Run until a setting has made `aim` tokens in two steps or more, or its window has ended."""
    num_steps = 0
    while line.is_in_window and (line.num_tokens < aim or num_steps < _MIN_STEPS):
        line.step(is_counted=num_steps > 0)
        num_steps += 1


def _requests(case: Case, turns: Turns, repeat: int, number: int = 0) -> list[Request]:
    requests = case.requests(repeat, number)
    return [replace(r, sampling=replace(r.sampling, temperature=turns.temperature)) for r in requests]


def cell_metrics(repeats: Sequence[Mapping[str, Sample]], fixed: Collection[str]) -> dict[str, Any]:
    """Return what a row of the table needs.

    Args:
        repeats: results of `run_in_turns`, at least one.
        fixed: the settings that the others are compared with, NAIVE among them.

    Returns:
        settings: name -> its numbers; `speed_up` is the median over the repeats of its rate over plain decoding's in
        the same repeat. best: the fastest of the fixed settings. over_best: every other setting -> its rate over the
        best one's, the median over the repeats.
    """
    settings = {name: _setting_metrics(repeats, name) for name in repeats[0]}
    best = max((name for name in settings if name in fixed), key=lambda name: settings[name]["speed_up"])
    others = [name for name in settings if name not in fixed]
    return {
        "settings": settings,
        "best": best,
        "over_best": {name: median(_rate(r[name]) / _rate(r[best]) for r in repeats) for name in others},
        "has_same_tokens": all(sample.token_ids == r[NAIVE].token_ids for r in repeats for sample in r.values()),
    }


def _setting_metrics(repeats: Sequence[Mapping[str, Sample]], name: str) -> dict[str, Any]:
    samples = [repeat[name] for repeat in repeats]
    speed_ups = [_rate(repeat[name]) / _rate(repeat[NAIVE]) for repeat in repeats]
    accepted = [acceptance(sample.window_stats) for sample in samples]
    rates = [rate for rate, _ in accepted if rate is not None]
    phases = [phase_ms(sample.window_stats) for sample in samples]
    return {
        "speed_up": median(speed_ups),
        "speed_up_min": min(speed_ups),
        "speed_up_max": max(speed_ups),
        "tokens_per_s": median(map(_rate, samples)),
        "tokens_per_step": mean(s.window_tokens / len(s.window_steps_s) / len(s.token_ids) for s in samples),
        "acceptance_length": mean(length for _, length in accepted),
        "acceptance_rate": mean(rates) if rates else None,
        "disturbed_share": _disturbed_share(samples),
        "step_ms": median(t * 1e3 for sample in samples for t in sample.window_steps_s),
        **{phase: mean(p[phase] for p in phases) for phase in phases[0]},
    }


def _rate(sample: Sample) -> float:
    """Tokens per second, where a disturbed step has taken as long as the median one."""
    middle = median(sample.window_steps_s)
    return sample.window_tokens / sum(middle if _is_disturbed(s, middle) else s for s in sample.window_steps_s)


def _disturbed_share(samples: Sequence[Sample]) -> float:
    """The disturbed steps among all: where there are many, something else ran on the machine."""
    counts = [sum(_is_disturbed(s, median(x.window_steps_s)) for s in x.window_steps_s) for x in samples]
    return sum(counts) / sum(len(x.window_steps_s) for x in samples)


def _is_disturbed(step_s: float, median_s: float) -> bool:
    """Whether a step took longer than its drafts can explain: another process had the processor meanwhile."""
    return step_s > _DISTURBED * median_s
