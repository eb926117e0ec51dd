"""The bodies of the routes about LoRA adapters, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, Ignored, Only


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter.

    Attributes:
        lora_name: the `model` of requests for it.
        lora_path: its folder, absolute or below `lora_root`.
        base_model_name: the model that it is for; a must where the server has several that may have adapters.
    """

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: Annotated[None, Only(False, instead="unload the adapter before")] = None


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter.

    Attributes:
        lora_int_id: ignored: adapters are known by name.
    """

    lora_name: str
    lora_int_id: Ignored = None
