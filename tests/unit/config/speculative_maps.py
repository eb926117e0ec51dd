"""A `speculative_config` map, read; or the error it gives."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config.speculative import SpeculativeConfig
from fastdeploy_sd.config.speculative_map import read_speculative
from fastdeploy_sd.errors import ConfigError


def read(**keys: object) -> SpeculativeConfig:
    return read_speculative(keys).config


def refusal(value: object) -> str:
    """The error's text after the option's name."""
    with pytest.raises(ConfigError) as caught:
        read_speculative(value)
    assert caught.value.param == "speculative_config"
    return caught.value.message.removeprefix("speculative_config")
