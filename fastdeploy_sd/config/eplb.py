"""What `eplb_config` says: how many copies of experts there are besides one of each, and when they move."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.maps import has_meaning, read_map
from fastdeploy_sd.config.unsupported import UNSUPPORTED_EPLB
from fastdeploy_sd.errors import ConfigError, shown

EPLB_OPTION = "eplb_config"
# vLLM's name of a key, and ours.
_ALIASES = {"num_redundant_experts": "redundant_experts_num"}
# FastDeploy's keys about how it moves weights and counts.
_WITHOUT_EFFECT = frozenset(
    {
        "redundant_expert_ip_shm_size",
        "redundant_expert_meta_dir",
        "redundant_expert_async_load_model_shmem_size_gb",
        "redundant_expert_enable_schedule_cordon",
        "model_use_safetensors",
        "model_use_offline_quant",
        "moe_quant_type",
    }
)
_LIMITS = {"redundant_experts_num": (0, 4096), "redundant_expert_dump_workload_interval": (1, 86400)}


@dataclass(frozen=True, slots=True)
class EplbConfig:
    """FastDeploy's keys.

    Attributes:
        redundant_experts_num: slots of each layer besides one for each expert.
        redundant_expert_dump_workload_interval: seconds for which rows are counted before experts are placed anew.
        redundant_expert_api_user, redundant_expert_api_password: what the routes about experts ask for.
    """

    redundant_experts_num: int = 0
    redundant_expert_dump_workload_interval: int = 10
    redundant_expert_api_user: str = ""
    redundant_expert_api_password: str = field(default="", repr=False)

    def to_map(self) -> dict[str, Any]:
        """Return the map that says this."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_password(self, text: str) -> EplbConfig:
        """Return this with another text in place of a password, where it has one."""
        return replace(self, redundant_expert_api_password=text) if self.redundant_expert_api_password else self


def read_eplb(value: object) -> EplbConfig:
    """Return what a map or its JSON text says.

    Raises ConfigError: no map or JSON object; a key that is unknown, repeated or not supported; a value out of range.
    """
    if isinstance(value, EplbConfig):
        value = value.to_map()
    faults = Faults()
    values: dict[str, Any] = {}
    names = [field.name for field in fields(EplbConfig)]
    for key, item in read_map(EPLB_OPTION, value).items():
        with faults.collecting():
            name = _ALIASES.get(key, key)
            if name in _WITHOUT_EFFECT or not has_meaning(EPLB_OPTION, name, item, names, UNSUPPORTED_EPLB):
                continue
            if name in values:
                raise ConfigError(f"{EPLB_OPTION}.{key}: expected one of its names, got both", param=EPLB_OPTION)
            values[name] = _within(key, item, _LIMITS[name]) if name in _LIMITS else _text(key, item)
    faults.raise_all()
    return EplbConfig(**values)


def _within(key: str, value: object, limits: tuple[int, int]) -> int:
    low, high = limits
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        text = f"{EPLB_OPTION}.{key}: expected an integer in {low}..{high}, got {shown(value)}"
        raise ConfigError(text, param=EPLB_OPTION)
    return value


def _text(key: str, value: object) -> str:
    """Return a text; another value is not repeated, as it may be a password."""
    if not isinstance(value, str):
        raise ConfigError(f"{EPLB_OPTION}.{key}: expected a text, got {type(value).__name__}", param=EPLB_OPTION)
    return value
