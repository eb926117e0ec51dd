"""Heads that do not fit their target or contradict themselves are refused by the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint, SafetensorsFile
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.drafters.dflash import build_dflash
from fastdeploy_sd.models.drafters.dflash_weights import open_dflash
from fastdeploy_sd.models.drafters.draft_model import TargetParts
from fastdeploy_sd.models.drafters.eagle import build_eagle, build_eagle3
from fastdeploy_sd.models.drafters.eagle_weights import EagleWeights, open_eagle, open_eagle3
from fastdeploy_sd.models.drafters.mtp_weights import open_mtp_weights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.types.shard import WHOLE_MODEL
from tests.models import rewrite
from tests.models.dflash_heads import HEADS, make_head
from tests.models.eagle_heads import target_path

Change = Callable[[dict[str, Any], rewrite.Tensors], object]
_OPEN = {"eagle": open_eagle, "eagle3": open_eagle3, "dflash": open_dflash}


def opened(path: Path, method: str, target: str = "llama-tiny") -> EagleWeights:
    checkpoint = Checkpoint(Path(target_path(target)))
    weights = _OPEN[method](checkpoint, read_decoder_config(checkpoint.config), str(path))
    weights.verify(4)
    return weights


def changed(folder: Path, name: str, change: Change) -> Path:
    path = make_head(folder, name).path
    file = SafetensorsFile(path / "model.safetensors")
    tensors = {tensor: np.array(file.tensor(tensor)) for tensor in file.entries}
    config = json.loads((path / "config.json").read_text())
    change(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    rewrite.write_file(path / "model.safetensors", tensors, {"format": "pt"})
    return path


def with_keys(**values: Any) -> Change:
    return lambda config, _: config.update(values)


def with_tensor(name: str, *shape: int, dtype: Any = np.float32) -> Change:
    return lambda _, tensors: tensors.update({name: np.zeros(shape, dtype)})


def without(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("eagle", with_keys(vocab_size=5000), "vocab_size: expected 4096 as in the target, got 5000"),
        ("eagle", with_keys(hidden_size=64), "hidden_size: expected 128 as in the target, got 64"),
        (
            "eagle",
            with_keys(num_hidden_layers=2),
            "expected a tensor 'layers.1.input_layernorm.weight'",
        ),
        ("eagle", with_keys(bias=False), "expected only tensors of an EAGLE head .* got 1 more: 'fc.bias'"),
        ("eagle of qwen", with_keys(bias=True), "expected a tensor 'fc.bias'"),
        ("eagle", with_tensor("layers.0.input_layernorm.weight", 128), "more: 'layers.0.input_layernorm.weight'"),
        ("eagle3", with_tensor("fc.weight", 128, 256), r"'fc.weight': expected shape \(128, 384\), got \(128, 256\)"),
        ("eagle3", without("d2t"), "expected a tensor 'd2t'"),
        ("eagle3", with_tensor("d2t", 100), "tensor 'd2t': expected dtype I64 or I32, got F32"),
        ("eagle3", without("lm_head.weight"), "expected a tensor 'lm_head.weight'"),
        (
            "eagle3",
            with_keys(draft_vocab_size=5000),
            r"draft_vocab_size: expected at most vocab_size \(4096\), got 5000",
        ),
        ("eagle3", with_keys(norm_before_fc=True), "expected a tensor 'input_norm.weight'"),
        ("eagle3", with_keys(norm_output="yes"), "norm_output: expected true or false, got 'yes'"),
        ("eagle3", with_keys(target_hidden_size=64), "target_hidden_size: expected the target's 128, got 64"),
        ("eagle3", with_keys(eagle_config=3), "eagle_config: expected a map, got 3"),
        (
            "eagle3",
            with_keys(eagle_aux_hidden_state_layer_ids=[0, 1, 4]),
            r"eagle_aux_hidden_state_layer_ids: expected layers of the target, which has 3, got \[0, 1, 4\]",
        ),
        ("eagle3 of SGLang", without("embed_tokens.weight"), "expected a tensor 'embed_tokens.weight'"),
        ("p-eagle", with_keys(ptd_token_id=None), "mask_token_id: expected an integer from 0 to 4095, got nothing"),
        ("p-eagle", with_keys(ptd_token_id=4096), "ptd_token_id: expected an integer from 0 to 4095, got 4096"),
        ("p-eagle", with_keys(mask_token_id=-1), "mask_token_id: expected an integer from 0 to 4095, got -1"),
        ("p-eagle of speculators", without("mask_hidden"), "expected a tensor 'mask_hidden'"),
        ("dflash", without("hidden_norm.weight"), "expected the tensors of a DFlash .* those of an EAGLE-1"),
        ("dflash", without("norm.weight"), "expected a tensor 'norm.weight'"),
        ("dflash", with_tensor("fc.weight", 128, 128), r"'fc.weight': expected shape \(128, 256\), got \(128, 128\)"),
        ("dflash", with_keys(block_size=1), "block_size: expected an integer from 2 to 64, got 1"),
        ("dflash", with_keys(block_size=None), "block_size: expected an integer from 2 to 64, got nothing"),
        ("dflash", with_keys(num_target_layers=4), "num_target_layers: expected the target's 3, got 4"),
        ("dflash", with_keys(dflash_config=[]), r"dflash_config: expected a map, got \[\]"),
        (
            "dflash",
            with_keys(dflash_config={"mask_token_id": 4096, "target_layer_ids": [0, 2]}),
            "mask_token_id: expected an integer from 0 to 4095, got 4096",
        ),
        (
            "dflash",
            with_keys(dflash_config={"mask_token_id": 9, "target_layer_ids": [0, 3]}),
            r"target_layer_ids: expected layers of the target, which has 3, got \[0, 3\]",
        ),
        ("dflash", with_tensor("layers.1.mlp.gate_proj.bias", 48), "only tensors of a DFlash drafter .* got 1 more"),
        ("dflash of speculators", without("d2t"), "expected a tensor 'd2t'"),
        (
            "p-eagle",
            with_tensor("mask_hidden", 1, 384),
            r"'mask_hidden': expected shape \(1, 1, 384\), got \(1, 384\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(name: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(changed(tmp_path, name, change), HEADS[name].method)


@pytest.mark.parametrize("tokens", [[0] * 2 + [-1] * 98, [4000] * 100, [-1] * 100])
def test_a_map_of_tokens_rises_and_stays_in_the_vocabulary(tokens: list[int], tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: rewrite.Tensors) -> None:
        tensors["d2t"] = np.array(tokens, np.int64)

    with pytest.raises(CheckpointError, match="tensor 'd2t': expected what is added to draft tokens to give tokens"):
        opened(changed(tmp_path, "eagle3", change), "eagle3")


def test_a_head_of_the_other_kind_is_refused_with_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected an EAGLE-3 head .* got an EAGLE-1 or EAGLE-2 head \(eagle\)"):
        opened(make_head(tmp_path, "eagle").path, "eagle3")


def test_a_target_with_a_factor_of_its_logits_is_refused(tmp_path: Path) -> None:
    path = make_head(tmp_path, "eagle", "granite-tiny").path
    with pytest.raises(CheckpointError, match=r"eagle: expected a target whose logits have no factor .*, got 0\."):
        opened(path, "eagle", "granite-tiny")


def test_a_block_bounds_the_drafts(tmp_path: Path) -> None:
    checkpoint, path = Checkpoint(Path(target_path())), make_head(tmp_path, "dflash").path
    weights = open_dflash(checkpoint, read_decoder_config(checkpoint.config), str(path))
    weights.verify(7)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens, .*: expected at most 7, the drafts of a block of"):
        weights.verify(8)


def test_a_head_is_no_mtp_layer(tmp_path: Path) -> None:
    checkpoint, path = Checkpoint(Path(target_path())), make_head(tmp_path, "eagle3").path
    with pytest.raises(ConfigError, match=r"model: expected MTP weights .* found an EAGLE-3 head \(eagle3\)"):
        open_mtp_weights(checkpoint, read_decoder_config(checkpoint.config), str(path))


@pytest.mark.parametrize("name", HEADS)
def test_the_forecast_of_its_bytes_is_what_it_takes(name: str, tmp_path: Path) -> None:
    """But for an embedding of its own, which is no packed matrix."""
    weights, scheme = (
        opened(make_head(tmp_path, name).path, HEADS[name].method),
        QuantScheme.create("bfloat16", "wint8"),
    )
    checkpoint = Checkpoint(Path(target_path()))
    config, packed = read_decoder_config(checkpoint.config), list[int]()
    decoder = Decoder(checkpoint, config, scheme)
    target = TargetParts(decoder, DecoderWeights(checkpoint, config), WeightPacker(checkpoint), scheme.lm_head)
    packer = WeightPacker(weights.checkpoint, None, lambda _, num_bytes: packed.append(num_bytes))
    build: Mapping[str, Callable[..., object]] = {"eagle": build_eagle, "eagle3": build_eagle3, "dflash": build_dflash}
    build[HEADS[name].method](target, weights, scheme, packer, 4)
    table = 2 * 4096 * (HEADS[name].hidden or 0)
    assert weights.num_bytes(scheme, 4, None, WHOLE_MODEL) == sum(packed) + table
