"""The golden checkpoints: tiny random models with what an independent float32 implementation computed for them.

reference.npz: for i in 0..5 `prompt_i` i32[n], `logits_i` f32[V] at the prompt's last position, `greedy_i` i32[48] the
greedy continuation and `margin_i` f32[48], the gap between the two largest logits at each of its steps.
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.types import F32, I32

ROOT = pathlib.Path(__file__).resolve().parent.parent / "golden"
NAMES = sorted(path.name for path in ROOT.iterdir() if (path / "reference.npz").exists())
# For what does not depend on how a layer computes, such as drafting and storage formats.
FIRST = ("ernie4_5-tiny", "ernie4_5_moe-tiny", "llama-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3_moe-tiny")
NUM_PROMPTS = 6


@dataclass(frozen=True)
class GoldenCase:
    """One prompt of one model."""

    prompt: I32
    logits: F32
    greedy: I32
    margin: F32


def has_experts(name: str) -> bool:
    """Whether a golden model is a mixture of experts."""
    return "experts" in (ROOT / name / "config.json").read_text()


def has_states(name: str) -> bool:
    """Whether layers of a golden model have recurrent states."""
    return "linear_attention" in (ROOT / name / "config.json").read_text()


def cases(name: str) -> list[GoldenCase]:
    """Return the prompts of a golden model, lengths 1, 7, 63, 64, 65, 200."""
    with np.load(ROOT / name / "reference.npz") as r:
        return [
            GoldenCase(*(r[f"{field}_{i}"] for field in ("prompt", "logits", "greedy", "margin")))
            for i in range(NUM_PROMPTS)
        ]
