"""A rank packs its part of the weights, in place from the mapped file, and keeps it in a file of its own."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from fastdeploy_sd.models.attention_config import AttentionConfig
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.layer_builder import LayerBuilder
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices, packed_matrices
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types.shard import Shard
from tests.models import golden, rewrite
from tests.models.packed_weights import SCHEME, only_file, warnings_of
from tests.models.ranks import rank_groups

pytestmark = pytest.mark.slow

NAME, MOE_NAME = "ernie4_5-tiny", "ernie4_5_moe-tiny"


class Loaded:
    """What a rank packed, by name, and how many bytes of the checkpoint that were."""

    def __init__(self, path: Path, shard: Shard, scheme: QuantScheme = SCHEME) -> None:
        checkpoint = Checkpoint(path)
        config = read_decoder_config(checkpoint.config)
        self.store, self.num_bytes = PackedMatrices(None), 0
        load_parts(checkpoint, config, scheme, WeightPacker(checkpoint, self.store, self._count), shard)

    def _count(self, num_bytes: int, _: int) -> None:
        self.num_bytes += num_bytes

    def packed(self) -> list[bytes]:
        return [data.tobytes() for data in self.store.values()]


def load_parts(
    checkpoint: Checkpoint, config: DecoderConfig, scheme: QuantScheme, packer: WeightPacker, shard: Shard
) -> None:
    """Pack all of a decoder that a rank has, without running it: that takes no other rank."""
    weights = DecoderWeights(checkpoint, config)
    with rank_groups(shard.size) as ranks:
        builder = LayerBuilder(config, scheme, packer, ranks[shard.rank].group)
        for i in range(config.num_layers):
            builder.layer(weights, i)
        builder.head(weights.lm_head(), scheme.lm_head)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [NAME, MOE_NAME])
def test_ranks_read_every_byte_once(name: str, size: int) -> None:
    """But for KV heads that several ranks have; routers and norms are no packed matrices."""
    tensors, config = rewrite.read(name), read_decoder_config(Checkpoint(golden.ROOT / name).config)
    num_bytes = sum(t.nbytes for n, t in tensors.items() if t.ndim == 2 and not n.endswith((".gate.weight", "_bias")))
    copies = max(size // config.attentions[0].num_kv_heads, 1)
    kv_names = ("k_proj.weight", "v_proj.weight")
    num_bytes += (copies - 1) * sum(t.nbytes for n, t in tensors.items() if n.endswith(kv_names))
    assert sum(Loaded(golden.ROOT / name, Shard(rank, size)).num_bytes for rank in range(size)) == num_bytes


def damaged_elsewhere(tensors: rewrite.Tensors, config: DecoderConfig, shard: Shard) -> rewrite.Tensors:
    """The tensors with NaN wherever the rank has nothing to look for."""
    rows, columns, experts = expected_parts(config, shard)
    out = {}
    for name, tensor in tensors.items():
        kept = np.ones(tensor.shape, bool)
        for part, own in rows.items():
            if part in name and tensor.ndim == 2 and ".experts." not in name:
                kept &= own[:, None]
        for part, own in columns.items():
            if part in name and tensor.ndim == 2 and ".experts." not in name:
                kept &= own
        if ".experts." in name:
            kept &= int(name.split(".experts.")[1].split(".")[0]) in experts
        out[name] = np.where(kept, tensor, np.uint16(0x7FC0) if tensor.dtype == np.uint16 else np.float32(np.nan))
    return out


def expected_parts(
    config: DecoderConfig, shard: Shard
) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray], range]:
    """Which rows and columns of matrices a rank of two has, written out for the two models here, and its experts."""
    rank, attention = shard.rank, config.attentions[0]
    assert isinstance(attention, AttentionConfig)

    def half(count: int) -> np.ndarray:
        return np.arange(count) // (count // 2) == rank

    width = config.dense.intermediate_size
    heads, kv_heads = half(attention.q_size), half(attention.kv_size)
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shared = ".shared_experts" if config.moe is not None else ".none"
    rows |= {f".mlp.{part}_proj": half(width) for part in ("gate", "up")}
    rows |= {f"{shared}.{part}_proj": half(64) for part in ("gate", "up")}
    columns = {"o_proj": heads, ".mlp.down_proj": half(width), f"{shared}.down_proj": half(64)}
    num_experts = 0 if config.moe is None else config.moe.num_experts
    return rows, columns, range(rank * num_experts // 2, (rank + 1) * num_experts // 2)


@pytest.mark.parametrize("layout", ["hugging-face", "paddle", "paddle-fused"])
@pytest.mark.parametrize("name", [NAME, MOE_NAME])
def test_a_rank_needs_nothing_but_its_part(name: str, layout: str, tmp_path: Path) -> None:
    sound, config = rewrite.read(name), read_decoder_config(Checkpoint(golden.ROOT / name).config)
    for rank in range(2):
        want = Loaded(golden.ROOT / name, Shard(rank, 2)).packed()
        tensors, metadata = damaged_elsewhere(sound, config, Shard(rank, 2)), {"format": "pt"}
        if layout != "hugging-face":
            tensors, metadata = rewrite.to_paddle_names(tensors, fused=layout == "paddle-fused"), {}
        path = rewrite.write_folder(tmp_path / str(rank), name)
        rewrite.write_file(path / "model.safetensors", tensors, metadata)
        assert Loaded(path, Shard(rank, 2)).packed() == want


def test_parts_of_a_matrix_are_views_of_it() -> None:
    """Of the file's pages, so, and no copies."""
    data = np.arange(48, dtype=np.float32).reshape(6, 8)
    for is_transposed in (False, True):
        whole = FloatPart("a", data.T.copy() if is_transposed else data, is_transposed)
        matrix = WeightMatrix((whole, FloatPart("b", 100 + data)))
        cut = matrix.rows([range(1, 3), range(4, 8)])
        np.testing.assert_array_equal(cut.to_array(), matrix.to_array()[[1, 2, 4, 5, 6, 7]])
        assert cut.name == "a[1:3] | a[4:6] | b[0:2]"
        assert all(np.shares_memory(part.data, whole.data) for part in cut.float_parts()[:2])
        cut = matrix.columns(range(2, 5))
        np.testing.assert_array_equal(cut.to_array(), matrix.to_array()[:, 2:5])
        assert cut.name == "a[:, 2:5] | b[:, 2:5]"
        assert np.shares_memory(cut.float_parts()[0].data, whole.data)
        assert matrix.rows([range(6), range(6, 12)]).columns(range(8)).parts == matrix.parts


def test_every_rank_has_a_file_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Path(shutil.copytree(golden.ROOT / NAME, tmp_path / "model"))
    folder, shards = tmp_path / "packed", [Shard(0, 1), Shard(0, 2), Shard(1, 2), Shard(1, 4)]
    for shard in shards:
        want = Loaded(model, shard).packed()
        for is_new in (True, False):
            checkpoint = Checkpoint(model)
            with packed_matrices(folder, checkpoint, SCHEME, "target", shard) as store:
                assert store is not None
                packer = WeightPacker(checkpoint, store)
                load_parts(checkpoint, read_decoder_config(checkpoint.config), SCHEME, packer, shard)
                assert [data.tobytes() for data in store.values()] == want
                assert store.has_new == is_new
    files = sorted(folder.glob("*.packed"))
    assert len(files) == len(shards)
    # A file under another rank's name is not used.
    first, second = (next(folder.glob(f"*rank{rank}of2*.packed")) for rank in range(2))
    shutil.copy(first, second)
    with packed_matrices(folder, Checkpoint(model), SCHEME, "target", Shard(1, 2)) as store:
        assert store is not None
        assert not store
    assert "expected the key" in warnings_of(caplog)[0]


def test_ranks_pack_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None waits for another: all are in the middle of it at the same time."""
    caplog.set_level(logging.INFO)
    middle = Barrier(2)

    def pack(rank: int) -> None:
        with packed_matrices(tmp_path, Checkpoint(golden.ROOT / NAME), SCHEME, "target", Shard(rank, 2)) as store:
            assert store is not None
            middle.wait(60)
            store.add("a", np.full(70, rank, np.uint8))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(pack, range(2)))
    assert "waiting for" not in caplog.text
    for rank in range(2):
        with packed_matrices(tmp_path, Checkpoint(golden.ROOT / NAME), SCHEME, "target", Shard(rank, 2)) as store:
            assert store is not None
            assert set(store["a"].tolist()) == {rank}


def test_another_rule_of_slices_packs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_new in ((1, True), (1, False), (2, True)):
        monkeypatch.setattr("fastdeploy_sd.models.weights.packed_cache.RULES_VERSION", version)
        with packed_matrices(tmp_path, Checkpoint(golden.ROOT / NAME), SCHEME, "target") as store:
            assert store is not None
            assert ("a" not in store) == is_new
            store.add("a", np.zeros(70, np.uint8))
    only_file(tmp_path)
