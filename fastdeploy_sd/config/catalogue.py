"""All options of this version by name, and which name a key or flag stands for."""

from __future__ import annotations

from fastdeploy_sd.config.aliases import SAME_MEANING
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.config.model_section import ModelConfig
from fastdeploy_sd.config.option import Option, options_of
from fastdeploy_sd.config.parallel_section import ParallelConfig
from fastdeploy_sd.config.redis_section import RedisConfig
from fastdeploy_sd.config.scheduler_section import SchedulerConfig
from fastdeploy_sd.config.sections import CacheConfig, Config
from fastdeploy_sd.config.server_section import ServerConfig
from fastdeploy_sd.config.speculative import SPECULATIVE_OPTION
from fastdeploy_sd.config.splitwise_section import SplitwiseConfig

# A map that stands for several configurations; see several_models.py.
MODELS_OPTION = "models"
MODELS_TEXT = (
    "Of serve: several models instead of `model`, each with engines of its own. NAME=MODEL, one per flag, or a map of"
    ' names to models or to options of a model, as {"small": {"model": "demo", "max_model_len": 2048}}; options outside'
    " of it are those of all models."
)
# Attribute of Config -> its class, in the order in which people read about them.
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "lora": LoraConfig,
    "parallel": ParallelConfig,
    "splitwise": SplitwiseConfig,
    "redis": RedisConfig,
    "server": ServerConfig,
}
OPTIONS: tuple[Option, ...] = (
    *(opt for section, cls in SECTIONS.items() for opt in options_of(cls, section)),
    *options_of(Config, ""),
)
BY_NAME: dict[str, Option] = {opt.name: opt for opt in OPTIONS}
KNOWN_NAMES: tuple[str, ...] = (*BY_NAME, SPECULATIVE_OPTION, MODELS_OPTION)
_ALIASES = {alias: opt.name for opt in OPTIONS for alias in opt.spec.aliases} | {
    name: foreign.here for name, foreign in SAME_MEANING.items()
}


def canonical_name(written: str) -> str:
    """Return the option name that a key or flag stands for: underscores, aliases resolved."""
    name = written.replace("-", "_")
    return _ALIASES.get(name, name)
