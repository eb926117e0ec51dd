"""Configuration: the one place where a command line, YAML, JSON and keyword arguments become frozen values.

Nothing is dropped, clipped or replaced: what cannot be honoured exactly is a ConfigError that names the option, where
it was written and the nearest known name. Knows no model, no Paddle and no HTTP.
"""

from __future__ import annotations

from fastdeploy_sd.config.addresses import is_this_machine, is_wildcard
from fastdeploy_sd.config.build import (
    Effective,
    config_from_kwargs,
    explain,
    from_json,
    load_config,
    to_json,
    verify_offline,
)
from fastdeploy_sd.config.environment import verify_keys_are_known
from fastdeploy_sd.config.generation_values import OVERRIDE_OPTION, GenerationValues
from fastdeploy_sd.config.model_names import hub_name
from fastdeploy_sd.config.model_section import DEMO_MODEL, ModelConfig, demo_drafter
from fastdeploy_sd.config.parallel_section import ParallelConfig
from fastdeploy_sd.config.quantization import Activations, Quantization, QuantizationFormats, formats_of
from fastdeploy_sd.config.redis_section import RedisConfig
from fastdeploy_sd.config.rules import cpu_only, gpu_only, verify_rules
from fastdeploy_sd.config.scheduler_section import SchedulerConfig
from fastdeploy_sd.config.sections import CacheConfig, Config, drafter_advice
from fastdeploy_sd.config.server_section import ServerConfig
from fastdeploy_sd.config.several_models import load_configs
from fastdeploy_sd.config.speculative import SpeculativeConfig
from fastdeploy_sd.config.splitwise_section import PROTOCOLS, SplitwiseConfig, ports_of

__all__ = [
    "DEMO_MODEL",
    "OVERRIDE_OPTION",
    "PROTOCOLS",
    "Activations",
    "CacheConfig",
    "Config",
    "Effective",
    "GenerationValues",
    "ModelConfig",
    "ParallelConfig",
    "Quantization",
    "QuantizationFormats",
    "RedisConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "SplitwiseConfig",
    "config_from_kwargs",
    "cpu_only",
    "demo_drafter",
    "drafter_advice",
    "explain",
    "formats_of",
    "from_json",
    "gpu_only",
    "hub_name",
    "is_this_machine",
    "is_wildcard",
    "load_config",
    "load_configs",
    "ports_of",
    "to_json",
    "verify_keys_are_known",
    "verify_offline",
    "verify_rules",
]
