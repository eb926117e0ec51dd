"""Qwen3-Next and Qwen3.5: published configurations, and checkpoints for text and pictures."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.attention_config import AttentionConfig, GatedDeltaConfig
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.rope_config import RopeConfig
from tests.models import golden, rewrite
from tests.models.harness import SingleSequence
from tests.models.published_configs import HYBRIDS

pytestmark = pytest.mark.slow

NAME = "qwen3_5_moe-tiny"


@pytest.mark.parametrize("release", HYBRIDS)
def test_a_release_is_read_from_its_config_alone(release: str) -> None:
    values = HYBRIDS[release]
    text, config = values.get("text_config", values), read_decoder_config(values)
    nets, attentions = set(config.delta_nets), set(config.attentions)
    assert nets == {GatedDeltaConfig(16, text["linear_num_value_heads"], 128, 128, 4)}
    assert len(config.delta_nets) == 3 * len(config.attentions) == 3 * text["num_hidden_layers"] // 4
    assert isinstance(config.layers[3].attention, AttentionConfig)
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    assert attentions == {AttentionConfig(heads, kv_heads, 256, RopeConfig(1e7, 64), qk_norm=True, output_gate=True)}
    assert (config.norm_offset, config.max_position) == (1.0, 262144)
    assert config.tie_word_embeddings == (release == "Qwen3.5-0.8B")
    assert (config.moe is not None) == ("A3B" in release)
    if config.moe is not None:
        assert (config.moe.num_experts, config.moe.top_k) == (text["num_experts"], text["num_experts_per_tok"])
        assert (config.moe.shared_intermediate_size, config.moe.shared_gate, config.moe.normalize) == (512, True, True)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_output_gate", False, "attn_output_gate: expected true"),
        ("linear_num_value_heads", 24, r"linear_num_value_heads: expected a multiple of linear_num_key_heads \(16\)"),
        ("linear_key_head_dim", 120, "linear_key_head_dim: expected a multiple of 16"),
        ("linear_conv_kernel_dim", 9, "linear_conv_kernel_dim: expected an integer from 2 to 8"),
        ("layer_types", ["linear_attention"] * 24, "layer_types: expected at least one 'full_attention'"),
        ("layer_types", ["full_attention"], "layer_types: expected a list of 24"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(key: str, value: object, message: str) -> None:
    values = HYBRIDS["Qwen3.5-0.8B"]
    with pytest.raises(CheckpointError, match=rf"text_config: {message}"):
        read_decoder_config(values | {"text_config": values["text_config"] | {key: value}})


def test_a_checkpoint_for_text_and_pictures_is_its_text_model(tmp_path: pathlib.Path) -> None:
    """Other names, stacked experts, and weights of vision, which are not read."""
    tensors: rewrite.Tensors = {"model.visual.patch_embed.proj.weight": np.zeros((4, 4), np.float32)}
    for name, value in rewrite.stack_experts(rewrite.read(NAME)).items():
        tensors[name.replace("model.", "model.language_model.", 1)] = value
    folder = pathlib.Path(shutil.copytree(golden.ROOT / NAME, tmp_path / "model"))
    (folder / "generation_config.json").unlink()
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    values = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(values))
    rewrite.write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    assert Checkpoint(folder).eos_token_ids() == (text["eos_token_id"],)
    prompt = golden.cases(NAME)[1].prompt
    found, wanted = (SingleSequence(model, "float32").logits(prompt) for model in (folder, NAME))
    np.testing.assert_array_equal(found, wanted)
