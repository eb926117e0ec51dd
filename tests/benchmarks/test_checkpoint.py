"""The random checkpoints: true shapes, readable as any other checkpoint, never half-written."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import checkpoint as writer
from benchmarks.__main__ import main
from benchmarks.checkpoint import add_mtp_layer, make_checkpoint
from benchmarks.shapes import MTP_FOLDER_FAMILIES, SHAPES, tensor_shapes
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.mtp_weights import open_mtp_weights
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.ops.bf16 import from_bf16

# As the model cards say; of models that are cut no card tells.
NUM_PARAMETERS = {"qwen3-0.6b": 596_049_920, "ernie4_5-0.3b": 360_748_032, "llama-3.2-1b": 1_235_814_400}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# What a family has besides; the gated delta nets' layer types give every kind of layer.
TINY_OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 32,
    },
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture
def tokenizer(golden_dir: Path) -> Path:
    return golden_dir / "qwen3-tiny"


@pytest.fixture(params=sorted(SHAPES))
def tiny_shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family's shape, made small."""
    name: str = request.param
    family = SHAPES[name]["model_type"]
    monkeypatch.setattr(writer, "SHAPES", {name: {**SHAPES[name], **TINY, **TINY_OF_FAMILY.get(family, {})}})
    return name


@pytest.fixture
def tiny_shape_with_mtp_folder(tiny_shape: str) -> str:
    if SHAPES[tiny_shape]["model_type"] not in MTP_FOLDER_FAMILIES:
        pytest.skip("its family has no MTP layers in a folder")
    return tiny_shape


def open_checkpoint(path: Path) -> tuple[Checkpoint, DecoderConfig]:
    checkpoint = Checkpoint(path)
    return checkpoint, read_decoder_config(checkpoint.config)


@pytest.mark.parametrize("shape", NUM_PARAMETERS)
def test_shapes_have_the_published_number_of_parameters(shape: str) -> None:
    assert sum(prod(tensor.dims) for tensor in tensor_shapes(SHAPES[shape])) == NUM_PARAMETERS[shape]


def test_holds_exactly_what_the_model_reads(tiny_shape: str, tmp_path: Path, tokenizer: Path) -> None:
    make_checkpoint(tiny_shape, tmp_path / "out", tokenizer=tokenizer)
    checkpoint, config = open_checkpoint(tmp_path / "out")
    weights = DecoderWeights(checkpoint, config)
    weights.verify()
    assert weights.lm_head().shape == (512, 64)
    assert (weights.final_norm() == 1 + config.norm_offset).all()
    assert [name for name in checkpoint.unread() if not name.startswith("mtp.")] == []


def test_weights_are_random_and_rows_differ(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHAPES", {"qwen3-0.6b": {**SHAPES["qwen3-0.6b"], **TINY, "vocab_size": 40_000}})
    make_checkpoint("qwen3-0.6b", tmp_path / "out", tokenizer=tokenizer)
    checkpoint, config = open_checkpoint(tmp_path / "out")
    bits = DecoderWeights(checkpoint, config).embedding().data
    assert bits.size > 2 * writer.BLOCK_SIZE, "the block must repeat for this test to mean anything"
    values = from_bf16(bits.astype(np.uint16))
    assert abs(values.std() - writer.WEIGHT_STD) < 0.01 * writer.WEIGHT_STD
    assert len({row.tobytes() for row in bits}) == len(bits)


def test_seed_decides_the_weights(tiny_shape: str, tmp_path: Path, tokenizer: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tiny_shape, tmp_path / name, seed, tokenizer)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_takes_the_special_tokens_of_the_tokenizer(tiny_shape: str, tmp_path: Path, tokenizer: Path) -> None:
    make_checkpoint(tiny_shape, tmp_path / "out", tokenizer=tokenizer)
    wanted: dict[str, Any] = json.loads((tokenizer / "config.json").read_text())
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == wanted["eos_token_id"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_wrong_arguments(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape: expected one of .*, got 'qwen3-0\.6' \(did you mean 'qwen3-0\.6b'"):
        make_checkpoint("qwen3-0.6", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"tokenizer: expected a directory with tokenizer\.json"):
        make_checkpoint("qwen3-0.6b", tmp_path / "out", tokenizer=tmp_path)
    with pytest.raises(ConfigError, match=r"out: expected a directory to create, got .*, which exists"):
        make_checkpoint("qwen3-0.6b", tmp_path, tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--mtp"]])
def test_the_command_writes_the_mtp_folder_when_asked(
    options: list[str], tiny_shape_with_mtp_folder: str, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    assert main(["checkpoint", tiny_shape_with_mtp_folder, str(out), "--tokenizer", str(tokenizer), *options]) == 0
    assert (out / "mtp").is_dir() is bool(options)


def test_an_mtp_layer_is_what_the_model_reads(tiny_shape_with_mtp_folder: str, tmp_path: Path, tokenizer: Path) -> None:
    make_checkpoint(tiny_shape_with_mtp_folder, tmp_path / "out", tokenizer=tokenizer)
    add_mtp_layer(tmp_path / "out")
    checkpoint, config = open_checkpoint(tmp_path / "out")
    weights = open_mtp_weights(checkpoint, config, None)
    assert (weights.path, weights.num_layers) == (tmp_path / "out" / "mtp", 1)
    assert weights.projection(0)[0].shape == (64, 128)
    weights.qkv(0), weights.output(0), weights.gate_up(0), weights.down(0), weights.qk_norms(0)
    assert (weights.embedding_norm(0) == 1).all()
    assert weights.head(0) is None
    with pytest.raises(ConfigError, match="checkpoint: expected a checkpoint without an mtp folder"):
        add_mtp_layer(tmp_path / "out")
    with pytest.raises(ConfigError, match="checkpoint: expected a checkpoint"):
        add_mtp_layer(tmp_path / "nothing")


def test_an_mtp_folder_is_refused_where_the_family_has_its_own_names(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="model_type: expected one of ernie4_5, llama, qwen3 for an mtp folder"):
        add_mtp_layer(tmp_path)
