"""How evenly experts' rows are spread over ranks by each way to place experts, and what a step costs by it.

A layer's experts take as long as its fullest rank. A placement is made from the counts of one window of steps, and
judged by those of the next one, as in a server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import table_of
from fastdeploy_sd.distributed.expert_balance import (
    ExpertGroupShape,
    Loads,
    balanced_placement,
    balancedness,
    rank_loads,
)
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.sharding import linear_experts

Placement = Sequence[Sequence[int]]
_DRIFT = 0.1  # of the logarithms of popularities, from one window to the next
_MAX_COUNT = 1 << 53


@dataclass(frozen=True, slots=True)
class SkewedExperts:
    """Rows per expert by a Zipf law: in every layer others are popular.

    Attributes:
        skew: exponent; 0 = all are equally popular.
        window: rows of a layer in a window.
    """

    num_layers: int
    num_experts: int
    skew: float
    window: int
    seed: int

    def windows(self) -> tuple[Loads, Loads]:
        """Return the counts of two windows, f64[num_layers, num_experts] each."""
        rng = np.random.default_rng(self.seed)
        ranks = rng.permuted(np.tile(np.arange(1, self.num_experts + 1), (self.num_layers, 1)), axis=1)
        logarithms = -self.skew * np.log(ranks)
        found = [logarithms, logarithms + rng.normal(0.0, _DRIFT, logarithms.shape)]
        first, second = (self._counts(rng, popularity) for popularity in found)
        return first, second

    def _counts(self, rng: np.random.Generator, logarithms: Loads) -> Loads:
        chances = np.exp(logarithms)
        return rng.multinomial(self.window, chances / chances.sum(axis=1, keepdims=True)).astype(np.float64)


def read_counts(path: Path) -> Loads:
    """Return counts f64[num_layers, num_experts] from a JSON file of a list per layer; ConfigError: it is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"expert_counts: expected a readable JSON file, got {path} ({error})") from None
    layers = found if isinstance(found, list) else []
    lengths = {len(layer) if isinstance(layer, list) else 0 for layer in layers}
    if len(lengths) != 1 or not all(
        type(count) is int and 0 <= count < _MAX_COUNT for layer in layers if isinstance(layer, list) for count in layer
    ):
        text = f"expected a list of counts per layer, equally many in each, got another in {path}"
        raise ConfigError(f"expert_counts: {text}", param="expert_counts")
    return np.array(layers, np.float64)


@dataclass(frozen=True, slots=True)
class Balance:
    """Of one placement, over layers.

    Attributes:
        mean, worst: balancedness, the mean load of the ranks by the greatest.
        rows_cost: time of the experts' part by that of ranks that are equally full, where rows take the time.
        reads_cost: the same where reading weights does: the experts that a step of so many tokens touches.
    """

    policy: str
    num_slots: int
    mean: float
    worst: float
    rows_cost: float
    reads_cost: float


def balances(
    first: Loads, second: Loads, num_ranks: int, redundant: Sequence[int], num_tokens: int, top_k: int
) -> list[Balance]:
    """Return the balance of consecutive experts, and of those that are placed by load with so many redundant slots.

    Args:
        first, second: counts that placements are made from, and judged by; f64[num_layers, num_experts].
        num_tokens: of a step, `top_k` experts each.

    Raises:
        ConfigError: more ranks than experts.
    """
    num_experts = first.shape[1]
    if not 1 <= num_ranks <= num_experts:
        raise ConfigError(f"ranks: expected at most as many as experts ({num_experts}), got {num_ranks}", param="ranks")
    linear = [list(experts) for experts in linear_experts(num_experts, num_ranks)]
    num_rows = num_tokens * top_k
    found = [_balance("linear", num_experts, [linear] * len(first), second, num_rows)]
    for count in redundant:
        shape = ExpertGroupShape(num_ranks, num_experts + count)
        placements = [balanced_placement(loads, shape) for loads in first]
        found.append(_balance(f"by load, {count} redundant", shape.num_slots, placements, second, num_rows))
    return found


def _balance(policy: str, num_slots: int, placements: Sequence[Placement], loads: Loads, num_rows: int) -> Balance:
    found = [balancedness(rank_loads(of, placed)) for of, placed in zip(loads, placements, strict=True)]
    reads = [_reads(of, placed, num_rows) for of, placed in zip(loads, placements, strict=True)]
    return Balance(
        policy=policy,
        num_slots=num_slots,
        mean=float(np.mean(found)),
        worst=min(found),
        rows_cost=float(np.mean([1 / one for one in found])),
        reads_cost=float(np.mean(reads)),
    )


def _reads(loads: Loads, placement: Placement, num_rows: int) -> float:
    """Weights of experts that the busiest rank reads in a step, by the mean of the ranks without redundant copies."""
    chances = loads / max(loads.sum(), 1.0)
    copies = np.bincount(np.concatenate([np.array(experts) for experts in placement]), minlength=len(loads))
    touched = 1 - (1 - np.minimum(chances / copies, 1.0)) ** num_rows
    once = 1 - (1 - chances) ** num_rows
    greatest = max(float(touched[list(experts)].sum()) for experts in placement)
    return greatest * len(placement) / float(once.sum())


_COLUMNS: Mapping[str, str] = {
    "Placement": "{0.policy}",
    "slots": "{0.num_slots}",
    "balancedness": "{0.mean:.2f}",
    "worst layer": "{0.worst:.2f}",
    "time by rows": "{0.rows_cost:.2f}",
    "time by weights read": "{0.reads_cost:.2f}",
}


def balances_table(found: Sequence[Balance]) -> str:
    return table_of(found, _COLUMNS)
