"""The bytes a step streams are those of the packed matrices."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_sd.config import Quantization, QuantizationFormats
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import attention_slices, feed_forward_slices
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.types.ranges import WHOLE

pytestmark = pytest.mark.slow

FORMATS: tuple[Quantization | None, ...] = (None, "wint8", "wint4", QuantizationFormats("wint4", "none", "wint4"))


@pytest.mark.parametrize("scheme", [QuantScheme.create("bfloat16", q) for q in FORMATS], ids=str)
@pytest.mark.parametrize("model", ["qwen3-tiny", "ernie4_5-tiny", "llama-tiny", "qwen2-tiny"])
def test_counts_every_packed_matrix_once(golden_dir: Path, model: str, scheme: QuantScheme) -> None:
    checkpoint = Checkpoint(golden_dir / model)
    config = read_decoder_config(checkpoint.config)
    weights = DecoderWeights(checkpoint, config)
    parts = [
        (weights.qkv, WHOLE),
        (weights.output, attention_slices(config.attentions[0])),
        (weights.gate_up, WHOLE),
        (weights.down, feed_forward_slices(config.dense.intermediate_size)),
    ]
    packed = [
        pack_linear(part(layer)[0], scheme.linear, slices)
        for layer in range(config.num_layers)
        for part, slices in parts
    ]
    packed.append(pack_linear(weights.lm_head(), scheme.lm_head))
    assert weight_bytes_per_step(config, scheme) == sum(p.data.nbytes for p in packed)


def test_mixture_of_experts_has_no_fixed_number(golden_dir: Path) -> None:
    config = read_decoder_config(Checkpoint(golden_dir / "qwen3_moe-tiny").config)
    assert weight_bytes_per_step(config, QuantScheme.create("bfloat16", None)) is None
