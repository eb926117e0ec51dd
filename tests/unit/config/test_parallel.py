"""The options of several ranks."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import from_json, load_config, to_json
from fastdeploy_sd.errors import ConfigError


@pytest.mark.parametrize("flags", ["--tensor-parallel-size 4", "-tp 4", "--tp-size=4", "--tensor_parallel_size=4"])
def test_every_spelling_of_the_number_of_ranks(model: str, flags: str) -> None:
    config = load_config(["--model", model, *flags.split()])
    assert config.parallel.tensor_parallel_size == 4
    assert from_json(to_json(config)).parallel == config.parallel


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("-tp 3", "tensor_parallel_size: expected one of 1, 2, 4, got '3'"),
        ("-tp two", "tensor_parallel_size: expected one of 1, 2, 4, got 'two'"),
        ("--timeout-rank 0", "timeout_rank: expected a number of at least 0.1, got '0'"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(model: str, flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message.startswith(text)
