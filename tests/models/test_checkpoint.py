"""Checkpoint directories: both namings, shards, and everything that must be refused with a clear text."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packer import WeightPacker
from tests.models import golden, rewrite
from tests.models.harness import SingleSequence

pytestmark = pytest.mark.slow

PROMPT = np.arange(5, 45, dtype=np.int32)


def logits_of(path: pathlib.Path) -> np.ndarray:
    return SingleSequence(path, "bfloat16").logits(PROMPT)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["ernie4_5-tiny", "ernie4_5_moe-tiny"])
def test_paddle_names_give_the_same_model(tmp_path: pathlib.Path, name: str, fused: bool) -> None:
    path = rewrite.write_folder(tmp_path / "m", name)
    rewrite.write_file(path / "model.safetensors", rewrite.to_paddle_names(rewrite.read(name), fused=fused))
    np.testing.assert_array_equal(logits_of(path), logits_of(golden.ROOT / name))


def test_an_untied_paddle_head_is_transposed_too(tmp_path: pathlib.Path) -> None:
    name = "ernie4_5-tiny"
    tensors = rewrite.to_paddle_names(rewrite.read(name), fused=True)
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["ernie.embed_tokens.weight"].T)
    path = rewrite.write_folder(tmp_path / "m", name, {"tie_word_embeddings": False})
    rewrite.write_file(path / "model.safetensors", tensors)
    np.testing.assert_array_equal(logits_of(path), logits_of(golden.ROOT / name))


def test_shards_with_an_index_give_the_same_model(tmp_path: pathlib.Path) -> None:
    name = "qwen3_moe-tiny"
    tensors = rewrite.read(name)
    path = rewrite.write_folder(tmp_path / "m", name)
    weight_map = {tensor: f"part-{i % 3}.safetensors" for i, tensor in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == file}
        rewrite.write_file(path / file, part, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    np.testing.assert_array_equal(logits_of(path), logits_of(golden.ROOT / name))


def test_float32_weights_are_read(tmp_path: pathlib.Path) -> None:
    name = "llama-tiny"
    widened = {k: (v.astype(np.uint32) << 16).view(np.float32) for k, v in rewrite.read(name).items()}
    path = rewrite.write_folder(tmp_path / "m", name)
    rewrite.write_file(path / "model.safetensors", widened, {"format": "pt"})
    np.testing.assert_array_equal(logits_of(path), logits_of(golden.ROOT / name))


def test_a_missing_tensor_is_named_with_the_nearest(tmp_path: pathlib.Path) -> None:
    tensors = rewrite.read("llama-tiny")
    tensors["model.layers.1.self_attn.o_projj.weight"] = tensors.pop("model.layers.1.self_attn.o_proj.weight")
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.self_attn\.o_proj\.weight'.*o_projj"):
        logits_of(path)


def test_a_tensor_of_another_shape_or_type_is_named(tmp_path: pathlib.Path) -> None:
    tensors = rewrite.read("llama-tiny")
    weights = tmp_path / "m" / "model.safetensors"
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    for wrong, text in (
        (np.zeros((3, 128), np.uint16), r"model\.norm\.weight.*expected shape \(128,\), got \(3, 128\)"),
        (np.zeros(128, np.int32), r"model\.norm\.weight.*expected a floating-point dtype, got I32"),
    ):
        rewrite.write_file(weights, tensors | {"model.norm.weight": wrong}, {"format": "pt"})
        with pytest.raises(CheckpointError, match=text):
            logits_of(path)


def test_the_index_may_not_lead_out_of_the_directory(tmp_path: pathlib.Path) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    rewrite.write_file(tmp_path / "outside.safetensors", rewrite.read("llama-tiny"), {"format": "pt"})
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected plain file names"):
        Checkpoint(path)


def test_the_index_names_files_that_can_be(tmp_path: pathlib.Path) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    for name, text in (
        ("x" * 100_000, "expected plain file names, got 'xxx"),
        ("", "expected a regular file, got a directory"),
        ("..", "expected a regular file, got a directory"),
        ("a\0b", "expected a readable safetensors file: embedded null byte"),
    ):
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(CheckpointError, match=text) as raised:
            Checkpoint(path)
        assert len(raised.value.message) < 500


def test_a_directory_without_safetensors_is_refused(tmp_path: pathlib.Path) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors files, found none"):
        Checkpoint(path)
    with pytest.raises(CheckpointError, match="expected a checkpoint directory"):
        Checkpoint(tmp_path / "nowhere")


UNSUPPORTED = {
    "architectures": (["GPT2LMHeadModel"], "expected one of .*LlamaForCausalLM"),
    "hidden_act": ("gelu", "hidden_act: expected 'silu' .*, got 'gelu'"),
    "num_key_value_heads": (3, r"num_key_value_heads: expected a divisor of num_attention_heads \(4\)"),
    "head_dim": (24, "head_dim: expected a multiple of 16, got 24"),
    "vocab_size": ("many", "vocab_size: expected an integer from 1 to 2147483647, got 'many'"),
    "rope_parameters": ([1], "rope_parameters: expected a map"),
    "attention_bias": ("yes", "attention_bias: expected true or false"),
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_the_layers_cannot_do_is_refused(key: str) -> None:
    value, text = UNSUPPORTED[key]
    config = json.loads((golden.ROOT / "llama-tiny" / "config.json").read_text()) | {key: value}
    with pytest.raises(CheckpointError, match=text):
        read_decoder_config(config)


def test_a_checkpoint_of_no_known_naming_is_refused(tmp_path: pathlib.Path) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    rewrite.write_file(path / "model.safetensors", {"transformer.wte.weight": np.zeros((4, 4), np.uint16)})
    checkpoint = Checkpoint(path)
    with pytest.raises(CheckpointError, match="found none"):
        DecoderWeights(checkpoint, read_decoder_config(checkpoint.config))


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_eos_ids_may_be_one_several_or_none(tmp_path: pathlib.Path, value: object, ids: tuple[int, ...]) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    rewrite.write_file(path / "model.safetensors", {"a": np.zeros(1, np.float32)})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert Checkpoint(path).eos_token_ids() == ids


def test_a_tensor_that_is_missing_or_too_much_shows_before_anything_is_packed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of a model that has none, and a layer more than config.json says, are another model's."""
    monkeypatch.setattr(WeightPacker, "linear", lambda *_: pytest.fail("packed"))
    complete = rewrite.read("qwen3_moe-tiny")
    path = rewrite.write_folder(tmp_path / "m", "qwen3_moe-tiny")
    last, more = "model.layers.2.mlp.experts.7.down_proj.weight", "model.layers.1.self_attn.q_proj.bias"
    for tensors, config, text in (
        ({k: v for k, v in complete.items() if k != last}, {}, f"expected a tensor '{last}', found none"),
        (complete | {more: np.ones(128, np.uint16)}, {}, f"got 1 more: '{more}'"),
        (complete, {"num_hidden_layers": 2}, r"got \d+ more: 'model\.layers\.2\.input_layernorm\.weight"),
        (complete, {"num_hidden_layers": 10_000}, r"expected a tensor 'model\.layers\.3\."),
    ):
        rewrite.write_config(path, "qwen3_moe-tiny", config)
        rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
        with pytest.raises(CheckpointError, match=text):
            logits_of(path)


def test_what_is_stored_beside_the_decoder_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Tables of old files, scales of a quantised cache, a copy of a tied head, draft layers."""
    name = "qwen3-tiny"
    tensors = rewrite.read(name)
    beside = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,), "model.layers.0.self_attn.k_scale": (1,),
              "lm_head.weight": (4096, 128), "model.layers.3.eh_proj.weight": (128, 256)}  # fmt: skip
    tensors |= {tensor: np.zeros(shape, np.float32) for tensor, shape in beside.items()}
    path = rewrite.write_folder(tmp_path / "m", name)
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    np.testing.assert_array_equal(logits_of(path), logits_of(golden.ROOT / name))


def test_a_truncated_file_is_named(tmp_path: pathlib.Path) -> None:
    path = rewrite.write_folder(tmp_path / "m", "llama-tiny")
    data = (golden.ROOT / "llama-tiny" / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a valid safetensors file: tensor .* needs"):
        Checkpoint(path)
