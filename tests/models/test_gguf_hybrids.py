"""GGUF files of Qwen3-Next and Qwen3.5: what the converter moved is where it was, and blocks stay integers."""

from __future__ import annotations

import pathlib

import gguf
import numpy as np
import pytest

from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.hub.gguf import checkpoint_folder
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.storages.gguf import BlockPart
from fastdeploy_sd.models.weights.storages.gguf_blocks import BLOCK_TYPES
from fastdeploy_sd.models.weights.storages.ordered_columns import OrderedColumns
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.group_format import UNIT
from fastdeploy_sd.ops.group_packing import group_format, pack_groups, stored_matrix
from fastdeploy_sd.ops.packing import packed_bytes
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types.ranges import WHOLE
from tests.models import gguf_files as files
from tests.models import golden
from tests.models.harness import SingleSequence
from tests.models.mtp_models import HYBRIDS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("model", HYBRIDS)
def test_a_file_of_a_hybrid_is_the_model_it_was_made_of(model: str, tmp_path: pathlib.Path) -> None:
    """Whatever the converter moves; decays pass through exp and log, and are rounded twice."""
    folder = checkpoint_folder([files.write(tmp_path / "m.gguf", model, "F32")])
    own, original = (decoder_weights(path) for path in (folder, golden.ROOT / model))
    own.verify()
    for layer in range(3):
        net, wanted_net = own.delta_net(layer), original.delta_net(layer)
        pairs = [(net.qkvz, wanted_net.qkvz), (net.beta_and_decay, wanted_net.beta_and_decay)]
        pairs.append((own.output(layer)[0], original.output(layer)[0]))
        for stored, wanted in pairs:
            np.testing.assert_array_equal(stored.to_array(), widen(wanted.to_array()))
        for role in ("conv", "dt_bias", "norm"):
            np.testing.assert_array_equal(getattr(net, role), getattr(wanted_net, role))
        np.testing.assert_allclose(widen(net.a_log), widen(wanted_net.a_log), rtol=0, atol=2**-23)
        np.testing.assert_array_equal(own.feed_forward_norm(layer), original.feed_forward_norm(layer))
    np.testing.assert_array_equal(own.qkv(3)[0].to_array(), widen(original.qkv(3)[0].to_array()))
    token_ids = np.random.default_rng(0).integers(4, 4096, 40).astype(np.int32)
    got, want = (SingleSequence(path, "float32").logits(token_ids) for path in (folder, golden.ROOT / model))
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_array_equal(got.argmax(1), want.argmax(1))


def decoder_weights(folder: pathlib.Path) -> DecoderWeights:
    source = Checkpoint(folder)
    return DecoderWeights(source, read_decoder_config(source.config))


def test_blocks_of_moved_heads_stay_integers(tmp_path: pathlib.Path) -> None:
    kinds = {"ssm_out": "Q8_0", "attn_qkv": "Q4_0", "attn_gate": "Q8_0"}
    path = files.write(tmp_path / "m.gguf", "qwen3_5-tiny", kinds)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    weights = decoder_weights(checkpoint_folder([path]))
    net, output = weights.delta_net(0), weights.output(0)[0]
    heads = [np.arange(32) + 32 * head for head in (0, 2, 1, 3)]
    np.testing.assert_array_equal(output.to_array(), stored["blk.0.ssm_out.weight"][:, np.concatenate(heads)])
    qkv, z = stored["blk.0.attn_qkv.weight"], stored["blk.0.attn_gate.weight"]
    want = np.concatenate([qkv[:128], *(qkv[128:][rows] for rows in heads), *(z[rows] for rows in heads)])
    np.testing.assert_array_equal(net.qkvz.to_array(), want)
    assert group_format([output], WHOLE) == group_format([net.qkvz], WHOLE) == "q8_0"


@pytest.mark.parametrize(("width", "kept"), [(128, "q4_k"), (64, "int8_g16"), (8, "float32")])
def test_columns_of_heads_stay_integers_where_they_are_whole_groups(width: int, kept: str) -> None:
    block = BLOCK_TYPES["Q4_K"]
    data = files.random_blocks(np.random.default_rng(2), "Q4_K", 40, 1024)
    whole = BlockPart("weight", data, block, 0, 1024)
    order = np.random.default_rng(3).permutation(1024 // width)
    moved = OrderedColumns.of(whole, [range(head * width, (head + 1) * width) for head in order])
    want = np.concatenate([whole.values()[:, head * width : (head + 1) * width] for head in order], axis=1)
    np.testing.assert_array_equal(moved.numbers().data, want)
    half = moved.rows(8, 40).columns(512, 1024)
    np.testing.assert_array_equal(half.numbers().data, want[8:, 512:])
    assert group_format([WeightMatrix((moved,))], WHOLE) == kept
    np.testing.assert_array_equal(moved.integers(slice(None)).numbers(), want)
    if width == UNIT:  # whole units of the kernels move, bit for bit
        own, stored = (packed_units(WeightMatrix((part,))) for part in (moved, whole))
        np.testing.assert_array_equal(own, stored[:, order])


def packed_units(matrix: WeightMatrix) -> np.ndarray:
    """u8[panels, units, bytes]."""
    rows, columns = matrix.shape
    packed = WeightMemory().take(packed_bytes(columns, rows, "q4_k"))
    stored = stored_matrix(matrix, "q4_k", WHOLE)
    assert stored is not None
    pack_groups(stored, packed)
    return packed.reshape(-1, columns // UNIT, packed.size * UNIT // (-(-rows // 32) * columns))


def test_decays_below_nothing_are_refused(tmp_path: pathlib.Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for tensors in writer.tensors:
            data = tensors["blk.0.ssm_a"].tensor
            assert data is not None
            data[1] = 0.5

    folder = checkpoint_folder([files.write(tmp_path / "m.gguf", "qwen3_5-tiny", "F32", change)])
    with pytest.raises(CheckpointError, match=r"A_log': expected numbers below 0, got others"):
        decoder_weights(folder).verify()
