"""Every field of config.json and generation_config.json has a type and a range, checked before anything is loaded."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.config_fields import FIELDS
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.rope_table import FactorScaling, YarnScaling
from tests.models import golden, rewrite

pytestmark = pytest.mark.slow

HUGE = 10**400
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "num_key_value_heads", "max_position_embeddings")  # fmt: skip
NOT_SIZES: tuple[object, ...] = (-1, 10**12, HUGE, 1.5, math.nan, math.inf, "8", True, [8], {})
NOT_NUMBERS: tuple[object, ...] = (0, -1.0, math.nan, math.inf, -math.inf, HUGE, "1", True, [1.0], {})
EXPERTS = {
    "qwen3_moe-tiny": ("num_experts_per_tok", "num_local_experts", "moe_intermediate_size", "decoder_sparse_step"),
    "glm4_moe-tiny": (
        "num_experts_per_tok",
        "n_routed_experts",
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
    ),
    "gpt_oss-tiny": ("num_experts_per_tok", "num_local_experts"),
    "ernie4_5_moe-tiny": ("moe_k", "moe_num_experts", "moe_intermediate_size", "moe_num_shared_experts"),
}
WINDOWS_FROM_1 = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}


def values_of(model: str) -> dict[str, Any]:
    return dict(json.loads((golden.ROOT / model / "config.json").read_text()))


def read(model: str, **changed: object) -> DecoderConfig:
    return read_decoder_config(values_of(model) | changed)


def refuse(model: str, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: expected .*, got ") as raised:
        read(model, **{key: value})
    assert len(raised.value.message) < 400
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("model", ["llama-tiny", "ernie4_5_moe-tiny"])
def test_a_size_is_an_integer_in_its_range(model: str, key: str) -> None:
    for value in (0, *NOT_SIZES):
        refuse(model, key, value)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_is_finite_and_positive(key: str) -> None:
    values = values_of("qwen2-tiny")
    del values["rope_parameters"]
    for value in NOT_NUMBERS:
        with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: expected a number from .*, got "):
            read_decoder_config(values | {key: value})


@pytest.mark.parametrize(("model", "key"), [(model, key) for model, keys in EXPERTS.items() for key in keys])
def test_experts_are_counted(model: str, key: str) -> None:
    for value in NOT_SIZES:
        refuse(model, key, value)


@pytest.mark.parametrize(("model", "key"), [(model, keys[0]) for model, keys in EXPERTS.items()])
def test_a_token_has_one_expert_at_least_and_no_more_than_there_are(model: str, key: str) -> None:
    for value in (0, 9, 65):
        refuse(model, key, value)
    assert read(model, **{key: 8, "topk_group": 2}).moe is not None


def test_groups_share_out_the_experts() -> None:
    for key, value in (("n_group", 3), ("n_group", 8), ("topk_group", 3), ("num_experts_per_tok", 5)):
        refuse("glm4_moe-tiny", key, value)
    refuse("glm4_moe-tiny", "scoring_func", "softmax")
    moe = read("glm4_moe-tiny", n_group=4, topk_group=2).moe
    assert moe is not None
    assert (moe.num_groups, moe.num_chosen_groups, moe.scale, moe.sigmoid) == (4, 2, 1.5, True)


def test_a_context_of_one_token_is_refused() -> None:
    refuse("llama-tiny", "max_position_embeddings", 1)


def test_a_scaling_s_parameters_have_ranges() -> None:
    for scaling, keys in (
        (YARN, ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")),
        (LLAMA3, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
        ({"rope_type": "linear", "factor": 2.0}, ("factor", "rope_theta")),
    ):
        for key in keys:
            for value in NOT_NUMBERS:
                with pytest.raises(CheckpointError, match=rf"^config\.json: rope_parameters: {key}: expected .*, got "):
                    read("qwen2-tiny", rope_parameters=scaling | {key: value})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type: expected one of default, linear, .*, longrope, got 'dyn"),
        ({"rope_type": ["yarn"]}, r"rope_type: expected one of .*, got \['yarn'\]"),
        ({"rope_type": "linear", "facter": 2.0}, r"facter: .*did you mean 'factor'"),
        ({"rope_type": "linear"}, "factor: expected a number from 1 to 1e"),
        ({"factor": 8.0}, "factor: expected none of this name for default"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1\.0 .nothing else is supported., got 0\.5"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"high_freq_factor: expected more than low_freq_factor .1., got 1\.0"),
        (YARN | {"beta_slow": 64.0}, r"beta_fast: expected at least beta_slow .64., got 32\.0"),
        (YARN | {"truncate": "no"}, "truncate: expected true or false, got 'no'"),
    ],
)
def test_what_a_scaling_cannot_be(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read("qwen2-tiny", rope_parameters=parameters)


def test_two_scalings_that_differ_are_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_scaling: expected the same as rope_parameters"):
        read("qwen2-tiny", rope_parameters=YARN, rope_scaling=YARN | {"factor": 2.0})


def test_partial_rotary_positions_are_refused_wherever_they_are_asked_for() -> None:
    refuse("llama-tiny", "partial_rotary_factor", 0.5)


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    """Whether the checkpoint gives the context before scaling or after it as its own."""
    for claimed, expected in ((1024, 4096), (4096, 4096), (40960, 40960)):
        config = read("qwen2-tiny", rope_parameters=YARN, max_position_embeddings=claimed)
        assert config.max_position == expected
    config = read("qwen2-tiny", rope_parameters={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=1024)
    rope = config.attentions[0].rope
    assert rope is not None
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.scaling.original_max_position, config.max_position) == (1024, 4096)


def test_longrope_has_factors_of_long_and_short_servers() -> None:
    rope = read("phi3-tiny").attentions[0].rope
    assert rope is not None
    assert rope.rotary_dim == 16
    long, short = rope.scaling_of_length(4097), rope.scaling_of_length(4096)
    assert isinstance(long, FactorScaling)
    assert isinstance(short, FactorScaling)
    assert (long.factors[7], short.factors[7]) == (24.0, 2.0)
    assert long.amplitude == short.amplitude == pytest.approx(math.sqrt(1 + math.log(2) / math.log(4096)))
    values = values_of("phi3-tiny")["rope_parameters"]
    for factors in ([1.0] * 7, [1.0] * 9, [0.0] * 8, [math.nan] * 8, [True] * 8, "1", None):
        with pytest.raises(CheckpointError, match=r"rope_parameters: long_factor: expected .*, got"):
            read("phi3-tiny", rope_parameters=values | {"long_factor": factors})
    with pytest.raises(CheckpointError, match="partial_rotary_factor: expected one that makes pairs"):
        read("phi3-tiny", rope_parameters=values | {"partial_rotary_factor": 0.01})


def test_layers_without_rotary_embedding_are_named_or_counted() -> None:
    def rotates(**changed: object) -> list[bool]:
        return [own.rope is not None for own in read("smollm3-tiny", **changed).attentions]

    assert rotates() == rotates(no_rope_layers=None) == [True, True, True, False]
    assert rotates(no_rope_layers=None, no_rope_layer_interval=2) == [True, False, True, False]
    for value in ([1, 1, 1], [1, 1, 1, 2], "1110"):
        refuse("smollm3-tiny", "no_rope_layers", value)


def test_layers_of_another_attention_are_refused() -> None:
    refuse("qwen3-tiny", "layer_types", ["full_attention", "chunked_attention", "full_attention"])
    refuse("qwen3-tiny", "layer_types", ["full_attention"] * 2)
    refuse("qwen3-tiny", "layer_types", "full_attention")
    assert read("qwen3-tiny", layer_types=["full_attention"] * 4).num_layers == 3


def test_layers_have_the_windows_of_their_types() -> None:
    """Windows from a layer on are what Qwen's older releases have."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    for config, wanted in (
        ({"layer_types": types, "sliding_window": 64}, [64, None, 64]),
        ({"layer_types": None, **WINDOWS_FROM_1}, [None, 64, 64]),
        ({"layer_types": None, **WINDOWS_FROM_1, "use_sliding_window": False}, [None] * 3),
    ):
        assert [own.window for own in read("qwen3-tiny", **config).attentions] == wanted
    with pytest.raises(CheckpointError, match="sliding_window: expected an integer from 1"):
        read("qwen3-tiny", layer_types=types)


def test_every_field_is_read_by_some_family() -> None:
    read_keys: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read_keys.add(key)
            return super().get(key, default)

    for name in golden.NAMES:
        read_decoder_config(Recorder(values_of(name)))
    read_decoder_config(Recorder(values_of("qwen2-tiny") | {"layer_types": None} | WINDOWS_FROM_1))
    assert set(FIELDS) <= read_keys


@pytest.mark.parametrize("value", ["2", 1.0, True, -1, HUGE, [2, None], {"a": 1}, [7] * 2000])
def test_eos_ids_are_token_ids(tmp_path: pathlib.Path, value: object) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    rewrite.write_file(path / "model.safetensors", {})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: eos_token_id: expected at most 1024 token ids"
    ):
        Checkpoint(path).eos_token_ids()
