"""fastdeploy_sd: an LLM server on PaddlePaddle in which speculative decoding is always safe to leave on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_sd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastdeploy_sd.entrypoints.offline.adapters import LoRARequest
    from fastdeploy_sd.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Import on first use: LLM brings in Paddle, which the HTTP process must not load."""
    if name == "LLM":
        from fastdeploy_sd.llm import LLM

        return LLM
    if name == "LoRARequest":
        from fastdeploy_sd.entrypoints.offline.adapters import LoRARequest

        return LoRARequest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
