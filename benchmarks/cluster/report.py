"""The figures of a simulated deployment, as a table or a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cluster.deployment import COMPLETE, LOST, REFUSED, Outcome
from benchmarks.command import table_of
from benchmarks.plot import panels
from fastdeploy_sd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Figures:
    """What an operator wants to know; times in milliseconds. None = no request gives it.

    Attributes:
        ttft_*: until the first token. tpot_*: mean time per token after it, of each request.
        hit_rate: share of the prompts' tokens that prefix caches had.
        imbalance: load of the fullest instance over the mean, on average over the seconds.
        num_resumed, num_moved: answers that went on elsewhere / requests that began anew elsewhere.
        rows_per_step: tokens.
    """

    num_instances: int
    policy: str
    num_requests: int
    num_complete: int
    num_refused: int
    num_lost: int
    num_moved: int
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    tokens_per_s: float
    hit_rate: float
    imbalance: float | None
    num_steps: int
    rows_per_step: float
    num_preemptions: int
    num_cut: int
    duration_s: float

    @classmethod
    def of(cls, num_instances: int, policy: str, outcome: Outcome) -> Figures:
        jobs = outcome.jobs
        ttft = [(job.first_s - job.due_s) * 1e3 for job in jobs if job.first_s is not None]
        complete = [job for job in jobs if job.ended == COMPLETE]
        tpot = [
            (job.end_s - job.first_s) / (job.num_done - 1) * 1e3
            for job in complete
            if job.first_s is not None and job.num_done > 1
        ]
        begin = min((job.due_s for job in jobs), default=0.0)
        duration = max((job.end_s for job in jobs), default=0.0) - begin
        return cls(
            num_instances=num_instances,
            policy=policy,
            num_requests=len(jobs),
            num_complete=len(complete),
            num_refused=sum(job.ended == REFUSED for job in jobs),
            num_lost=sum(job.ended == LOST for job in jobs),
            num_moved=sum(job.num_moves > 0 for job in jobs),
            ttft_p50=_percentile(ttft, 50),
            ttft_p99=_percentile(ttft, 99),
            tpot_p50=_percentile(tpot, 50),
            tpot_p99=_percentile(tpot, 99),
            tokens_per_s=sum(job.num_done for job in jobs) / duration if duration else 0.0,
            hit_rate=outcome.num_hit_tokens / max(outcome.num_query_tokens, 1),
            imbalance=float(np.mean(outcome.imbalance)) if outcome.imbalance else None,
            num_steps=outcome.num_steps,
            rows_per_step=outcome.num_rows / max(outcome.num_steps, 1),
            num_preemptions=outcome.num_preemptions,
            num_cut=outcome.num_cut,
            duration_s=duration,
        )


def _percentile(values: Sequence[float], rank: int) -> float | None:
    return float(np.percentile(values, rank)) if values else None


_COLUMNS: Mapping[str, str | Callable[[Figures], object]] = {
    "Instances": "{0.num_instances}",
    "Policy": "{0.policy}",
    "TTFT p50 ms": "{0.ttft_p50:.0f}",
    "p99": "{0.ttft_p99:.0f}",
    "ms/token p50": "{0.tpot_p50:.1f}",
    "p99 ": "{0.tpot_p99:.1f}",
    "tokens/s": "{0.tokens_per_s:.0f}",
    "prefix hits": "{0.hit_rate:.1%}",
    "imbalance": lambda of: None if of.imbalance is None else f"{of.imbalance:.2f}",
    "moved": "{0.num_moved}",
    "refused": "{0.num_refused}",
    "lost": "{0.num_lost}",
}


def figures_table(figures: Sequence[Figures]) -> str:
    return table_of(figures, _COLUMNS)


def plot_figures(path: Path, figures: Sequence[Figures]) -> None:
    """Draw p99 of the time to first token, prefix hits and imbalance by the number of instances, a line a policy."""
    drawn: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
        ("TTFT p99, ms", lambda of: of.ttft_p99),
        ("prefix hits, %", lambda of: 100 * of.hit_rate),
        ("imbalance (fullest / mean)", lambda of: of.imbalance),
    )
    sizes = list(dict.fromkeys(of.num_instances for of in figures))
    policies = dict.fromkeys(of.policy for of in figures)
    try:
        with panels(path, 1, len(drawn), "Simulated deployment, by placement policy") as axes:
            for axis, (title, value) in zip(axes[0], drawn, strict=True):
                for policy in policies:
                    own = [of for of in figures if of.policy == policy]
                    axis.plot([of.num_instances for of in own], [value(of) for of in own], marker="o", label=policy)
                axis.set_xscale("log")
                axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
                axis.minorticks_off()
                axis.set_ylim(bottom=0)
                axis.set_title(title)
                axis.set_xlabel("instances")
                axis.grid(alpha=0.3)
            axes[0][0].legend(fontsize="small")
    except OSError as error:
        raise ConfigError(f"plot: expected a file that can be written, got {path} ({error.strerror})") from None
