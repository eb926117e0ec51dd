"""Draft layers shared out among ranks: hidden rows and logits of two and four ranks are those of one."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.tensors import from_numpy
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.drafters.draft_model import DraftInputs, DraftModel
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.linear import TpGroup
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.kv_cache import RequestBlocks
from fastdeploy_sd.worker.kv import kv_memory, kv_sizing
from fastdeploy_sd.worker.loading.draft_weights import open_draft_weights
from fastdeploy_sd.worker.loading.model_loading import load_model
from fastdeploy_sd.worker.loading.rotary import make_rotary
from tests.models.mtp_models import make_model
from tests.models.ranks import Rank, rank_groups, together

pytestmark = pytest.mark.slow

NUM_TOKENS, BLOCK_SIZE = 70, 64

Loaded = tuple[DraftModel, DecoderConfig]


def load(path: pathlib.Path, num_layers: int, head: str, group: TpGroup, **model: Any) -> Loaded:
    speculative = SpeculativeConfig("mtp", num_layers, num_model_steps=num_layers, draft_head_quantization=head)  # type: ignore[arg-type]
    config = Config(ModelConfig(str(path), **model), speculative=speculative)
    checkpoint = Checkpoint(path)
    decoder_config = read_decoder_config(checkpoint.config)
    weights = open_draft_weights(config, checkpoint, decoder_config)
    return load_model(config, checkpoint, decoder_config, weights, group).drafts["mtp"], weights["mtp"].config


def bits(loaded: Loaded, rank: Rank, dtype: str) -> list[np.ndarray]:
    """Run every layer over one sequence; what the next step reads, and the logits."""
    (draft, c), n = loaded, NUM_TOKENS
    rng = np.random.default_rng(0)
    rank.begin(1)
    layers = kv_sizing.LayerKv.of_draft_layers(c, draft.num_layers, rank.group.shard)
    caches = kv_memory.allocate(layers, 2, kv_sizing.KvCacheFormat(BLOCK_SIZE, dtype))
    found = []
    for layer, cache in enumerate(caches):
        first = layer + 1
        inputs = AttentionInputs(
            positions=from_numpy(np.arange(first, n, dtype=np.int32)),
            slot_mapping=from_numpy(np.arange(first, n, dtype=np.int64)),
            query_start_loc=from_numpy(np.array([0, n - first], np.int32)),
            seq_lens=from_numpy(np.array([n], np.int32)),
            blocks=RequestBlocks(from_numpy(np.zeros(1, np.int32)), from_numpy(np.arange(2, dtype=np.int32)[None])),
            rotary=make_rotary(c, n, n),
        )
        token_ids = rng.integers(4, 4096, n - first).astype(np.int32)
        values = rng.standard_normal((n - first, c.hidden_size)).astype(np.float32)
        hidden = from_numpy(values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16))
        output = draft.forward(layer, DraftInputs(token_ids, hidden, [cache] * (layer + 1), inputs))
        found += [device().read(part).copy() for part in (*output, draft.logits(layer, output.normed))]
    return found


@pytest.mark.parametrize(
    ("name", "layout", "num_layers", "head", "model"),
    [
        ("ernie4_5-tiny", "ernie-folder", 1, "auto", {"dtype": "bfloat16"}),
        ("ernie4_5_moe-tiny", "ernie-inside", 1, "target", {"dtype": "float32"}),
        ("qwen3_moe-tiny", "numbered", 2, "wint8", {"dtype": "bfloat16", "quantization": "wint4"}),
        ("glm4_moe-tiny", "numbered", 1, "auto", {"dtype": "bfloat16"}),
        ("deepseek_v3-tiny", "numbered", 1, "auto", {"dtype": "bfloat16"}),
        ("llama-tiny", "numbered-own", 2, "auto", {"dtype": "bfloat16", "quantization": "wint8"}),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_draft_what_one_does(  # noqa: PLR0917
    name: str, layout: str, num_layers: int, head: str, model: dict[str, Any], size: int, tmp_path: pathlib.Path
) -> None:
    path = make_model(tmp_path, name, layout, num_layers).path
    with rank_groups(1) as [alone]:
        want = bits(load(path, num_layers, head, alone.group, **model), alone, model["dtype"])
    assert len(want) == 3 * num_layers
    with rank_groups(size) as ranks:
        drafts = [load(path, num_layers, head, rank.group, **model) for rank in ranks]
        works = [
            functools.partial(bits, draft, rank, model["dtype"]) for draft, rank in zip(drafts, ranks, strict=True)
        ]
        for got in together(works):
            for part, wanted in zip(got, want, strict=True):
                np.testing.assert_array_equal(part, wanted)
