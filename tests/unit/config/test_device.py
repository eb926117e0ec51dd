"""Where the model runs, and what a GPU cannot do yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy_sd.config import from_json, load_config, to_json
from fastdeploy_sd.config.device_rules import cpu_only
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker import device_choice

CPU_ONLY = {
    "-tp 2 --swap-space 1": ("tensor_parallel_size", "1 beside swap_space or a splitwise_role", "2"),
    "-tp 2 --ips 127.0.0.1,127.0.0.2": ("ips", "one host", "127.0.0.1,127.0.0.2"),
    "--max-num-seqs 4097 --max-num-batched-tokens 65536": ("max_num_seqs", "at most 4096", "4097"),
    "--enforce-eager": ("enforce_eager", "false", "true"),
}


GPU_ONLY = {
    "--quantization fp8": ("quantization", "wint8, wint4 or none"),
    '--quantization {"moe_quant_type":"fp8"}': ("quantization", "wint8, wint4 or none"),
    "--kv-cache-dtype fp8": ("kv_cache_dtype", "auto or int8"),
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


@pytest.mark.parametrize(("flags", "refusal"), GPU_ONLY.items())
def test_what_a_cpu_cannot_do_is_refused_by_name(
    model: str, flags: str, refusal: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, expected = refusal
    text = f"{option}: expected {expected} on a CPU, got fp8, which needs device gpu"
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message.startswith(text)
    assert caught.value.param == option
    load_config(["--model", model, "--device", "gpu", *flags.split()])
    config = load_config(["--model", model, "--device", "auto", *flags.split()])
    monkeypatch.setattr(device_choice, "usable_library", lambda _: "none is here")
    with pytest.raises(ConfigError) as caught:
        device_choice.choose_device(config)
    assert caught.value.message.startswith(f"{text}: device auto takes the CPU: device: expected cpu or auto")
    with pytest.raises(ConfigError, match="on a CPU, got fp8"):
        device_choice.choose_device(replace(config, device="cpu"))
