"""The options of LoRA adapters: which there are, and how many rows of a step may differ in theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_sd.config.option import Spec, option, verify_fields
from fastdeploy_sd.errors import ConfigError, shown

MAX_NAME_CHARS = 128
DEFAULT_RANK, MAX_RANK = 16, 512
_MODULES = "lora_modules"
_KEYS = {"name", "path", "base_model_name"}  # the last one is vLLM's, and says nothing here: there is one model


def name_fault(name: str) -> str | None:
    """Return why a text cannot be an adapter's name, None = it can."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or any(c.isspace() or c == "=" for c in name):
        return f"expected 1..{MAX_NAME_CHARS} printable characters without spaces and '=', got {shown(name)}"
    return None


def read_module(value: object) -> str:
    """Return `name=path` of that text, or of a map of name and path, or its JSON text. Raises ConfigError."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _fault(f"expected a JSON object, got text that is none: {error}") from None
    if isinstance(value, Mapping):
        unknown = sorted(str(key) for key in value if key not in _KEYS)
        if unknown or not all(isinstance(value.get(key), str) for key in ("name", "path")):
            raise _fault(f"expected a map of name and path, got {shown(value)}")
        value = f"{value['name']}={value['path']}"
    if not isinstance(value, str):
        raise _fault(f"expected name=path or a map of name and path, got {shown(value)}")
    name, equals, path = value.partition("=")
    if not equals or not path:
        raise _fault(f"expected name=path, got {shown(value)}")
    if fault := name_fault(name):
        raise _fault(f"name: {fault}")
    return value


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of the served model; without one of the first two options there are none."""

    enable_lora: bool | None = option(
        None,
        Spec("Whether requests may name LoRA adapters as their `model`; none: if `lora_modules` names some."),
    )
    lora_modules: tuple[str, ...] = option(
        (),
        Spec(
            "Adapters that are there from the start, as `name=FOLDER` (in PEFT's layout) or as a map or JSON object of"
            " `name` and `path`; several after one flag, or a list.",
            read_item=read_module,
            default_text="none",
        ),
    )
    max_loras: int | None = option(
        None,
        Spec(
            "Adapters whose weights are in the model's memory at once; requests of others wait for a free place. none:"
            " as many as `lora_modules` names, at least one.",
            minimum=1,
            maximum=1024,
        ),
    )
    max_lora_rank: int | None = option(
        None,
        Spec(
            f"Highest rank of an adapter; each place has room for it. none: {DEFAULT_RANK}.",
            minimum=1,
            maximum=MAX_RANK,
        ),
    )
    lora_root: str | None = option(
        None,
        Spec(
            "Folder below which `/v1/load_lora_adapter` may load adapters while the server runs; none: the route is"
            " refused."
        ),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "lora")
        names = [name for name, _ in self.modules]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise _fault(f"expected every name once, got {', '.join(repeated)} again")

    @property
    def modules(self) -> list[tuple[str, Path]]:
        """Name and folder of each adapter that is there from the start."""
        pairs = (module.partition("=") for module in self.lora_modules)
        return [(name, Path(path)) for name, _, path in pairs]

    @property
    def is_enabled(self) -> bool:
        """Whether requests may name adapters."""
        return bool(self.lora_modules) if self.enable_lora is None else self.enable_lora

    @property
    def num_slots(self) -> int:
        """Places for adapters in the model's memory; 0 = there are no adapters."""
        return (self.max_loras or max(len(self.lora_modules), 1)) if self.is_enabled else 0

    @property
    def max_rank(self) -> int:
        """Highest rank of an adapter."""
        return self.max_lora_rank or DEFAULT_RANK


def _fault(text: str) -> ConfigError:
    return ConfigError(f"{_MODULES}: {text}", param=_MODULES)
