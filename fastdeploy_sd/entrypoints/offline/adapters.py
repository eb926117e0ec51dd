"""LoRA adapters of the offline LLM: which one each prompt runs with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_sd.engine.adapters import AdapterRegistry
from fastdeploy_sd.errors import BadRequest, NotFound
from fastdeploy_sd.types import Adapter

_NAME = "lora_request"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, as vLLM names one.

    Attributes:
        lora_int_id: ignored: adapters are known by name.
        lora_path: its folder; "" = an adapter of `lora_modules`, or one that was loaded before.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


Adapters = LoRARequest | Sequence[LoRARequest | None] | None


def adapters_per_prompt(registry: AdapterRegistry, given: Adapters, num_prompts: int) -> list[Adapter | None]:
    """Return the adapter of each prompt, whether one for all, one each or none was given; new ones are loaded.

    Raises BadRequest: another number of them, or the LLM has no adapters; CheckpointError: a folder holds no adapter of
    the model; NotFound: an adapter without a folder is not loaded.
    """
    if given is None or isinstance(given, LoRARequest):
        return [_adapter(registry, given)] * num_prompts
    what = f"{_NAME}: expected a LoRARequest, or one or None for each of {num_prompts} prompts"
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != num_prompts:
        raise BadRequest(f"{what}, got {type(given).__name__}", param=_NAME)
    for one in given:
        if one is not None and not isinstance(one, LoRARequest):
            raise BadRequest(f"{what}, got {type(one).__name__} among them", param=_NAME)
    return [_adapter(registry, one) for one in given]


def _adapter(registry: AdapterRegistry, wanted: LoRARequest | None) -> Adapter | None:
    if wanted is None:
        return None
    known = next((source for source in registry.known if source.adapter.name == wanted.lora_name), None)
    if known is None and not wanted.lora_path:
        text = f"{_NAME}: expected a loaded adapter or a lora_path, got {wanted.lora_name!r}"
        raise NotFound(text, param=_NAME, code="adapter_not_loaded")
    if known is None:
        known = registry.load(wanted.lora_name, Path(wanted.lora_path))
    elif wanted.lora_path and Path(wanted.lora_path) != Path(known.folder):
        text = f"{_NAME}: expected {wanted.lora_name!r} in {known.folder}, as it was loaded, got {wanted.lora_path}"
        raise BadRequest(text, param=_NAME)
    return known.adapter
