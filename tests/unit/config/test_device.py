"""Where the model runs, and what a GPU cannot do yet."""

from __future__ import annotations

import pytest

from fastdeploy_sd.config import from_json, load_config, to_json
from fastdeploy_sd.config.device_rules import cpu_only
from fastdeploy_sd.errors import ConfigError

CPU_ONLY = {
    "-tp 2": ("tensor_parallel_size", "1", "2"),
    "--splitwise-role decode": ("splitwise_role", "mixed", "decode"),
    "--swap-space 0.5": ("swap_space", "none", "0.5"),
    "--enforce-eager": ("enforce_eager", "false", "true"),
}


def test_a_device_is_named(model: str) -> None:
    config = load_config(["--model", model, "--device", "gpu"])
    assert config.device == "gpu"
    assert from_json(to_json(config)) == config
    assert load_config(["--model", model]).device == "cpu"
    with pytest.raises(ConfigError, match="device: expected one of auto, cpu, gpu, got 'cuda'"):
        load_config(["--model", model, "--device", "cuda"])


@pytest.mark.parametrize(("flags", "refusal"), CPU_ONLY.items())
def test_what_a_gpu_cannot_do_is_refused_by_name(model: str, flags: str, refusal: tuple[str, str, str]) -> None:
    option, expected, got = refusal
    text = f"{option}: expected {expected} with device gpu, which can do no other yet, got {got}"
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, "--device", "gpu", *flags.split()])
    assert caught.value.message.startswith(text)
    for device in ("cpu", "auto"):
        config = load_config(["--model", model, "--device", device, *flags.split()])
        assert [error.message for error in cpu_only(config)] == [text]
