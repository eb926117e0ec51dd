"""Options of FastDeploy that could not change anything here: taken, and not in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_sd.config import config_from_kwargs, load_config
from fastdeploy_sd.config.catalogue import KNOWN_NAMES
from fastdeploy_sd.config.no_effect import NO_EFFECT
from fastdeploy_sd.config.unsupported import UNSUPPORTED
from fastdeploy_sd.errors import ConfigError

VALUES = {int: 3, float: 0.5, bool: True, str: "7671,7672", dict: {"use_cudagraph": True}}


def test_options_of_one_reason_share_a_line(model: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["--model", model, "--static-decode-blocks", "2", "--prealloc-dec-block-slot-num-threshold=7"])
    assert config == load_config(["--model", model])
    assert caplog.messages == [
        "static_decode_blocks, prealloc_dec_block_slot_num_threshold: accepted without effect: a request gets KV"
        " blocks as it needs them"
    ]


@pytest.mark.parametrize("name", NO_EFFECT)
def test_every_one_is_taken_with_a_line_that_names_it(name: str, model: str, caplog: pytest.LogCaptureFixture) -> None:
    value = next(iter(NO_EFFECT[name].choices), VALUES[NO_EFFECT[name].kind])
    config = config_from_kwargs(model=model, **{name: value})
    assert config == config_from_kwargs(model=model)
    assert [line.partition(":")[0] for line in caplog.messages] == [name]


@pytest.mark.parametrize("value", [55664, "55664", "1,2", [1, 2], None])
def test_ports_are_a_number_a_text_or_a_list(model: str, value: object) -> None:
    assert config_from_kwargs(model=model, cache_queue_port=value) == config_from_kwargs(model=model)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("kv_cache_ratio", "much", "expected a number in 0..1, or none, got 'much'"),
        ("kv_cache_ratio", 90, "expected a number in 0..1, or none, got 90"),
        ("scheduler_load_shards_num", "x", "expected an integer, or none, got 'x'"),
        ("cache_queue_port", True, "expected a non-empty string, or none, got true"),
        ("graph_optimization_config", True, "expected a map, got true"),
        ("graph_optimization_config", '{"use_cudagraph": true', "expected a JSON object, got text that is none"),
    ],
)
def test_a_value_of_another_type_is_an_error(model: str, name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, **{name: value})
    assert caught.value.message.startswith(f"{name}: {text}")


@pytest.mark.parametrize("flags", ["--enable-overlap-schedule -tp 1", "--no-disable-custom-all-reduce"])
def test_switches_need_no_value(model: str, flags: str) -> None:
    assert load_config(["--model", model, *flags.split()]) == load_config(["--model", model])


def test_graph_optimization_is_read_from_a_command_line_and_from_yaml(model: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("graph_optimization_config:\n  use_cudagraph: True\n  draft_model_use_cudagraph: True\n")
    want = load_config(["--model", model])
    assert load_config(["--model", model, "--graph-optimization-config", '{"use_cudagraph":false}']) == want
    assert load_config(["--model", model, "--config", str(file)]) == want


def test_the_kinds_of_options_are_apart() -> None:
    assert NO_EFFECT.keys().isdisjoint(KNOWN_NAMES)
    assert NO_EFFECT.keys().isdisjoint(UNSUPPORTED)


def test_vllms_usual_flags_start_with_a_line_each(model: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = (
        "--enable-auto-tool-choice --tool-call-parser hermes --dtype auto --trust-remote-code --generation-config vllm"
    )
    config = load_config(["--model", model, *flags.split()])
    assert config == load_config(["--model", model, "--tool-call-parser", "hermes", "--generation-config", "vllm"])
    assert "dtype" not in config.origins
    assert sorted(line.partition(":")[0] for line in caplog.messages) == [
        "dtype",
        "enable_auto_tool_choice",
        "trust_remote_code",
    ]
