"""Compares one drafting configuration with plain decoding: the same requests, interleaved, in two engines.

The two are interleaved because a machine's speed changes from one second to the next; a speed-up is the ratio of two
neighbours, and the median of those. Knows no files and no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.engines import greedy_request
from benchmarks.hardware import MemorySpeed, measure_memory, memory_json
from benchmarks.offline_run import Sample, mean_window, run_requests
from benchmarks.prompts import REPEATED
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import I32, Request


@dataclass(frozen=True, slots=True)
class Case:
    """One workload at one batch size.

    Attributes:
        prompts: as many as the batch size.
        output_len: tokens per request; they go on after an EOS.
    """

    workload: str
    prompts: Sequence[I32]
    output_len: int

    @property
    def batch(self) -> int:
        """Requests at once."""
        return len(self.prompts)

    def requests(self, repeat: int, number: int = 0) -> list[Request]:
        """Return the greedy requests of a repeat.

        A salt of its own keeps every repeat from what methods and prefix cache learnt in the others; the requests of
        one repeat differ by `number` in nothing but their names.
        """
        salt = f"{self.workload}-{self.batch}-{repeat}"
        return [
            greedy_request(f"{salt}-{row}-{number}", prompt, self.output_len, seed=row, cache_salt=salt)
            for row, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    """One repeat: plain decoding, then drafting, and the memory's speed before and after."""

    naive: Sample
    drafting: Sample
    memory: tuple[MemorySpeed, MemorySpeed]

    @property
    def speed_up(self) -> float:
        """Decoded tokens per second of drafting over those of plain decoding."""
        return self.drafting.tokens_per_s / self.naive.tokens_per_s

    @property
    def has_same_tokens(self) -> bool:
        """Whether both gave every request the same tokens."""
        return self.naive.token_ids == self.drafting.token_ids


def run_pairs(
    naive: Engine, drafting: Engine, case: Case, repeats: int, on_pair: Callable[[Pair], object]
) -> list[Pair]:
    """Run a case `repeats` times in both engines, after one run that is not counted.

    Raises:
        InternalError: a request failed.
    """
    for engine in (naive, drafting):
        _run(engine, case, repeat=repeats)
    pairs = []
    for repeat in range(repeats):
        before = measure_memory()
        samples = [_run(engine, case, repeat) for engine in (naive, drafting)]
        pairs.append(Pair(samples[0], samples[1], (before, measure_memory())))
        on_pair(pairs[-1])
    return pairs


def pair_metrics(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return what a row of the table needs; rates are medians of the repeats."""
    drafting = [pair.drafting for pair in pairs]
    speed_ups = [pair.speed_up for pair in pairs]
    return {
        "speed_up": median(speed_ups),
        "speed_up_min": min(speed_ups),
        "speed_up_max": max(speed_ups),
        "decode_tokens_per_s": median(sample.tokens_per_s for sample in drafting),
        "naive_decode_tokens_per_s": median(pair.naive.tokens_per_s for pair in pairs),
        **mean_window(drafting, length_name="acceptance_length"),
        "tokens_per_step": mean(_tokens_per_step(sample) for sample in drafting),
        "step_ms": median(t * 1e3 for sample in drafting for t in sample.window_steps_s),
        "naive_step_ms": median(t * 1e3 for pair in pairs for t in pair.naive.window_steps_s),
        "has_same_tokens": all(pair.has_same_tokens for pair in pairs),
        "read_gb_per_s_min": min(speed.read_gb_per_s for pair in pairs for speed in pair.memory),
        "read_gb_per_s_max": max(speed.read_gb_per_s for pair in pairs for speed in pair.memory),
    }


def pair_json(pair: Pair) -> dict[str, Any]:
    """Return one repeat as it appears in a record."""
    before, after = pair.memory
    return pair_metrics([pair]) | {"memory_before": memory_json(before), "memory_after": memory_json(after)}


def _run(engine: Engine, case: Case, repeat: int) -> Sample:
    if case.workload == REPEATED:
        run_requests(engine, case.requests(repeat, number=1))
    return run_requests(engine, case.requests(repeat))


def _tokens_per_step(sample: Sample) -> float:
    """Mean tokens of a request in a step of the window, in which all requests ran."""
    return sample.window_tokens / len(sample.window_steps_s) / len(sample.token_ids)
