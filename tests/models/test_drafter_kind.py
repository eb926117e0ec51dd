"""Which kind of drafter a folder is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.hub import located
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.drafters.drafter_kind import drafter_kind, open_drafter
from tests.models import rewrite

_EAGLE3 = ("fc.weight", "midlayer.hidden_norm.weight", "d2t", "lm_head.weight", "norm.weight")
_EAGLE = ("fc.weight", "layers.0.self_attn.q_proj.weight", "embed_tokens.weight")
_WHOLE = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
_DFLASH = ("fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_norm.weight")
_MLP = ("speculator.emb.0.weight", "speculator.proj.0.weight", "speculator.head.0.weight")
_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def folder_of(path: Path, config: Mapping[str, Any], tensors: Sequence[str]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    rewrite.write_file(
        path / "model.safetensors", {name: np.zeros(2, np.float32) for name in tensors}, {"format": "pt"}
    )
    return path


@pytest.mark.parametrize(
    ("kind", "config", "tensors"),
    [
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, _EAGLE3),
        ("eagle3", _LLAMA | {"draft_vocab_size": 9}, _EAGLE3),
        ("eagle3", _LLAMA, ("fc.weight", "layers.0.hidden_norm.weight")),
        ("eagle3", {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, _EAGLE3),
        ("p_eagle", {"architectures": ["LlamaForCausalLMEagle3"]}, (*_EAGLE3, "mask_hidden")),
        ("p_eagle", {"speculators_model_type": "peagle"}, (*_EAGLE3, "mask_hidden")),
        ("eagle", {"architectures": ["LlamaForCausalLMEagle"]}, _EAGLE),
        ("eagle", {"model_type": "eagle", "architectures": ["EAGLEModel"]}, _EAGLE),
        ("eagle", _LLAMA, _EAGLE),
        ("medusa", {"medusa_num_heads": 2}, ("0.0.linear.weight", "0.1.weight")),
        ("medusa", {"model_type": "medusa"}, ("medusa_heads.blocks.0.layers.0.weight",)),
        ("medusa", _LLAMA, (*_WHOLE, "medusa_head.0.0.linear.weight")),
        ("hydra", {"hydra_num_heads": 4}, ("hydra_mlp.0.0.linear.weight",)),
        ("mlp_speculator", {"model_type": "mlp_speculator"}, _MLP),
        ("arctic_lstm", {"model_type": "mlp_speculator", "proj_dim": 4}, ("speculator.forget_emb.0.weight",)),
        ("dflash", {"architectures": ["DFlashDraftModel"], "dflash_config": {}}, _DFLASH),
        ("dspark", {"dflash_config": {"projector_type": "dspark"}}, (*_DFLASH, "markov_head.markov_w1.weight")),
        ("dflash", {"speculators_model_type": "dflash"}, _DFLASH),
        ("dflash2", {"dflash_config": {}}, (*_DFLASH, "candidate_selector.hidden_projection.weight")),
        ("mtp", {}, ("model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight")),
        ("mtp", {"speculators_model_type": "mtp"}, ("mtp_layers.0.input_proj.weight",)),
        ("draft_model", _LLAMA | {"num_nextn_predict_layers": 1}, (*_WHOLE, "model.layers.4.eh_proj.weight")),
        ("draft_model", _LLAMA, _WHOLE),
    ],
)
def test_a_kind_is_told_by_its_config_and_its_tensors(
    kind: str, config: dict[str, Any], tensors: Sequence[str], tmp_path: Path
) -> None:
    assert drafter_kind(Checkpoint(folder_of(tmp_path, config, tensors))) == kind


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"medusa_num_heads": 2}, _EAGLE3, "expected the tensors of Medusa heads, .* got those of an EAGLE-3 head"),
        (
            {"architectures": ["EagleLlamaForCausalLM"]},
            _EAGLE3,
            "the tensors of an EAGLE-1 .* those of an EAGLE-3 head",
        ),
        ({"speculators_model_type": "x"}, _EAGLE3, "speculators_model_type: expected one of peagle, .* got 'x'"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(
    config: dict[str, Any], tensors: Sequence[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        drafter_kind(Checkpoint(folder_of(tmp_path, config, tensors)))


def test_another_kind_than_the_method_runs_is_refused_with_what_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"medusa_num_heads": 2}, ("0.0.linear.weight",))
    with pytest.raises(ConfigError, match=r"model: expected a whole model for .* got Medusa heads \(medusa\) in"):
        open_drafter(str(folder), "draft_model")


def test_auto_is_told_which_drafter_is_in_the_folder(tmp_path: Path) -> None:
    config = Config(ModelConfig(model="m"), speculative=SpeculativeConfig("auto", 4, auto_with_draft_model=True))

    def with_drafter(values: dict[str, Any], tensors: Sequence[str]) -> Config:
        folder = folder_of(tmp_path / "drafter", values, tensors)
        return replace(config, speculative=replace(config.speculative, model=str(folder)))

    assert located(with_drafter(_LLAMA, _WHOLE)).speculative.draft_models == ("draft_model",)
    eagle3 = with_drafter({"architectures": ["LlamaForCausalLMEagle3"]}, _EAGLE3)
    assert located(eagle3).speculative.draft_models == ("eagle3",)
    p_eagle = with_drafter({"speculators_model_type": "peagle"}, (*_EAGLE3, "mask_hidden"))
    assert located(p_eagle).speculative.draft_models == ("eagle3",)
    with pytest.raises(ConfigError, match=r"speculative_config.model: expected a drafter of .*, got a Domino"):
        located(with_drafter({"dflash_config": {"projector_type": "domino"}}, _DFLASH))
