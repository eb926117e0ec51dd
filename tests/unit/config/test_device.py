"""Where the model runs, and what a GPU cannot do yet."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from fastdeploy_sd.config import from_json, load_config, to_json
from fastdeploy_sd.config.catalogue import BY_NAME
from fastdeploy_sd.config.faults import SeveralFaultsError
from fastdeploy_sd.config.rules import cpu_only
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.loading import device_choice

DEVICE_OPTIONS = (
    "tensor_parallel_size", "ips", "splitwise_role", "swap_space", "max_num_seqs", "max_num_batched_tokens",
    "enforce_eager", "quantization", "kv_cache_dtype", "dtype", "gpu_memory_utilization", "num_gpu_blocks_override",
    "kv_cache_memory_gb", "block_size", "max_model_len", "async_scheduling",
)  # fmt: skip
VALUES = (
    "-1", "0", "1", "2", "3", "4097", "65536", "1e9", "nan", "inf", "", "none", "true", "auto", "fp8", "int8", "wint4",
    "prefill", "decode", "127.0.0.1,127.0.0.2", "{}", "float16", "9" * 20,
)  # fmt: skip
CPU_ONLY = {
    "-tp 2 --ips 127.0.0.1,127.0.0.2": ("ips", "one host", "127.0.0.1,127.0.0.2"),
    "--enforce-eager": ("enforce_eager", "false", "true"),
}


GPU_ONLY = {
    "--quantization fp8": ("quantization", "wint8, wint4 or none", "fp8"),
    '--quantization {"moe_quant_type":"fp8"}': ("quantization", "wint8, wint4 or none", "fp8"),
    "--kv-cache-dtype fp8": ("kv_cache_dtype", "auto or int8", "fp8"),
    "--dtype float16": ("dtype", "bfloat16 or float32", "float16"),
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
    model: str, flags: str, refusal: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, expected, got = refusal
    text = f"{option}: expected {expected} on a CPU, got {got}, which needs device gpu"
    with pytest.raises(ConfigError) as caught:
        load_config(["--model", model, *flags.split()])
    assert caught.value.message.startswith(text)
    assert caught.value.param == option
    load_config(["--model", model, "--device", "gpu", *flags.split()])
    config = load_config(["--model", model, "--device", "auto", *flags.split()])
    monkeypatch.setattr(device_choice, "usable_library", lambda _, **__: "none is here")
    with pytest.raises(ConfigError) as caught:
        device_choice.choose_device(config)
    assert caught.value.message.startswith(f"{text}: device auto takes the CPU: device: expected cpu or auto")
    with pytest.raises(ConfigError, match=f"on a CPU, got {got}"):
        device_choice.choose_device(replace(config, device="cpu"))


def test_every_wrong_combination_is_told_in_lines_that_name_an_option(model: str) -> None:
    """All that one start can tell, and never a traceback."""
    rng, num_refused = random.Random(17), 0
    for _ in range(300):
        flags = [f"{BY_NAME[name].flag}={rng.choice(VALUES)}" for name in rng.sample(DEVICE_OPTIONS, 4)]
        try:
            load_config(["--model", model, "--device", rng.choice(["gpu", "auto", "cpu"]), *flags])
        except ConfigError as error:
            num_refused += 1
            for fault in error.faults if isinstance(error, SeveralFaultsError) else (error,):
                assert fault.param is not None
                assert fault.param in fault.message.split(":")[0], flags
                assert re.fullmatch(r".*expected .*, got .*", fault.message), flags
    assert num_refused > 100
    with pytest.raises(SeveralFaultsError, match="2 faults"):
        load_config(["--model", model, "--device", "cpu", "--quantization", "fp8", "--kv-cache-dtype", "fp8"])
