"""fastdeploy_sd: an LLM server on PaddlePaddle in which speculative decoding is always safe to leave on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_sd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastdeploy_sd.llm import LLM, LoRARequest

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Import on first use: LLM brings in Paddle, which the HTTP process must not load."""
    if name in {"LLM", "LoRARequest"}:
        from fastdeploy_sd import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
