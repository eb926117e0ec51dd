"""A checkpoint that goes up to a GPU: what is packed there is what the host packs, for every kind of matrix."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.device.cuda import uploads as cuda_uploads
from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import MoeConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import draft_bytes, resident_bytes
from fastdeploy_sd.models.weights import packed_cache
from fastdeploy_sd.models.weights import packer as weight_packer
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.layer_weights import expert_parts
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.worker.loading.device_choice import choose_device
from fastdeploy_sd.worker.loading.draft_weights import draft_head_format, open_draft_weights, own_scheme
from fastdeploy_sd.worker.loading.model_loading import LoadedModel, load_model
from tests.engine.gpu import gpu_device
from tests.models import golden, quantized_files, rewrite
from tests.models.mtp_models import make_model
from tests.ops.cuda_device import EMULATED

pytestmark = pytest.mark.slow


def loaded(config: Config) -> LoadedModel:
    choose_device(config)
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    return load_model(config, checkpoint, decoder, open_draft_weights(config, checkpoint, decoder))


def files_of(config: Config, folder: pathlib.Path) -> dict[str, bytes]:
    """What is in the files of packed weights that a start leaves: every matrix, and its key."""
    model = loaded(replace(config, model=replace(config.model, packed_weights_cache=str(folder))))
    assert model.drafts
    return {path.name: path.read_bytes() for path in folder.glob("*.packed")}


def refusing(what: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise AssertionError(what)

    return refuse


@pytest.mark.parametrize(("name", "layout"), [("ernie4_5_moe-tiny", "ernie-folder"), ("qwen3_moe-tiny", "numbered")])
def test_experts_and_draft_layers_are_packed_as_by_the_host(
    name: str, layout: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In pieces smaller than a matrix. The next start sends what the file has, and packs nothing."""
    config = Config(
        ModelConfig(str(make_model(tmp_path, name, layout).path), quantization="wint4"),
        speculative=SpeculativeConfig(method="mtp", num_speculative_tokens=1, draft_head_quantization="wint8"),
    )
    want = files_of(config, tmp_path / "host")
    assert len(want) == 2
    on_gpu = replace(config, device="gpu")
    monkeypatch.setattr(cuda_uploads, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(weight_packer, "pack_into", refusing("the host packs"))
    with gpu_device(EMULATED):
        assert files_of(on_gpu, tmp_path / "gpu") == want
        monkeypatch.setattr(weight_packer, "pack_on_device", refusing("it is packed again"))
        caplog.set_level(logging.INFO, packed_cache.__name__)
        caplog.clear()
        assert files_of(on_gpu, tmp_path / "gpu") == want
    assert [one.message for one in caplog.records if one.name == packed_cache.__name__] == []  # nothing was written


@pytest.mark.parametrize(
    ("name", "layout", "quantization"),
    [
        ("ernie4_5_moe-tiny", "ernie-folder", "wint4"),
        ("qwen3_moe-tiny", "numbered", "wint8"),
        ("llama-tiny", "numbered", None),
        ("qwen3-tiny", "ernie-folder", None),
    ],
)
def test_bytes_of_weights_are_told_before_they_are_loaded(
    name: str, layout: str, quantization: Literal["wint8", "wint4"] | None, tmp_path: pathlib.Path
) -> None:
    config = Config(
        ModelConfig(str(make_model(tmp_path, name, layout).path), quantization=quantization),
        speculative=SpeculativeConfig(method="mtp", num_speculative_tokens=1),
    )
    choose_device(config)
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    drafts = open_draft_weights(config, checkpoint, decoder)
    draft_config = drafts["mtp"].config
    scheme = QuantScheme.create("bfloat16", quantization)
    head = draft_head_format(config, scheme.lm_head)
    told = resident_bytes(decoder, scheme) - decoder.vocab_size * decoder.hidden_size * 2
    told += draft_bytes(draft_config, own_scheme(config), 1, None if head == scheme.lm_head else head)
    experts = [
        layer.mlp.num_experts for layer in (*decoder.layers, draft_config.layers[0]) if isinstance(layer.mlp, MoeConfig)
    ]
    routers = 4 * decoder.hidden_size * sum(experts)
    assert load_model(config, checkpoint, decoder, drafts).weight_bytes == told - routers


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3_moe-tiny"])
def test_bytes_of_codes_are_told_too(name: str, tmp_path: pathlib.Path) -> None:
    """Of a checkpoint in FP8, whose experts take most of it."""
    path, _ = quantized_files.write(tmp_path, name, quantized_files.float8("channel", {}))
    config, checkpoint = Config(ModelConfig(str(path)), device="gpu"), Checkpoint(path)
    decoder = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    scheme, weights = QuantScheme.create("bfloat16", None), DecoderWeights(checkpoint, decoder)
    routers = sum(4 * layer.mlp.num_experts for layer in decoder.layers if isinstance(layer.mlp, MoeConfig))
    rest = (routers + 2 * decoder.vocab_size) * decoder.hidden_size
    with gpu_device(EMULATED):
        got = loaded(config).weight_bytes
    assert got == resident_bytes(decoder, scheme, weights=weights) - rest
    assert got < resident_bytes(decoder, scheme) - rest - 400_000


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_float16_cannot_hold_is_named(name: str, tmp_path: pathlib.Path) -> None:
    tensors = rewrite.read("llama-tiny")
    tensors[name][7, 3] = 0xC789  # -70144 in bfloat16
    path = rewrite.write_folder(tmp_path / "model", "llama-tiny")
    rewrite.write_file(path / "model.safetensors", tensors)
    config = Config(ModelConfig(str(path), dtype="float16"), device="gpu")
    with (
        gpu_device(EMULATED),
        pytest.raises(CheckpointError, match=rf"^tensor '{name}': .*, up to 65504, got .* 70144; start .* bfloat16$"),
    ):
        loaded(config)


def test_a_table_of_embeddings_is_converted_piece_by_piece(
    golden_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_uploads, "PIECE_BYTES", 100_000)
    config = Config(ModelConfig(str(golden_dir / "llama-tiny"), dtype="float32"), device="gpu")
    with gpu_device(EMULATED):
        model = loaded(config)
        got = device().read(model.decoder.embed._table)
    table = Checkpoint(golden_dir / "llama-tiny").tensor("model.embed_tokens.weight", got.shape)
    np.testing.assert_array_equal(got, (table.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "wint8", "wint4", "fp8"])
def test_an_expert_that_moves_in_has_the_bytes_of_one_that_was_loaded(fmt: LinearFormat) -> None:
    config = ModelConfig(str(golden.ROOT / "qwen3_moe-tiny"))
    checkpoint = Checkpoint(config.path)
    decoder = read_decoder_config(checkpoint.config)
    weights, moe = DecoderWeights(checkpoint, decoder), decoder.layers[0].mlp
    assert isinstance(moe, MoeConfig)
    parts = [weights.down(0, part, moe.intermediate_size)[0] for part in expert_parts(moe)[:2]]
    with gpu_device(EMULATED):
        choose_device(Config(config, device="gpu"))
        packer = WeightPacker(checkpoint)
        packed = packer.experts(parts, fmt, are_spread=True, may_move=True)
        device().prepare_overwrites(packed.expert_bytes)
        loaded = device().read(packed.data).copy().reshape(2, -1)
        packer.pack_expert(parts[1], fmt, packed, packed.data.data_ptr())
        np.testing.assert_array_equal(device().read(packed.data).reshape(2, -1), loaded[[1, 1]])
