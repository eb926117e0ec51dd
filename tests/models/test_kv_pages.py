"""Pages of several ranks: the bytes that one rank would have, and every rank gets its heads of them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.worker.kv import kv_memory
from fastdeploy_sd.worker.kv.kv_file import ALIGNMENT, KvFile, create_kv_file
from fastdeploy_sd.worker.kv.kv_memory import DraftLayerKv, RankKv
from fastdeploy_sd.worker.kv.kv_pages import KvPages
from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv
from tests.models.test_kv_tensors import CONFIG, FORMATS

pytestmark = pytest.mark.slow

NUM_BLOCKS = 3
NUM_DRAFT_LAYERS = 2


def ranks_of(size: int, fmt: KvCacheFormat) -> list[RankKv]:
    """The same model's KV on so many ranks, target and draft layers; it has two KV heads."""
    ranks = []
    for shard in (Shard(rank, size) for rank in range(size)):
        draft = LayerKv.of_draft_layers(CONFIG, NUM_DRAFT_LAYERS, shard)
        heads = DecoderShard(CONFIG, shard).kv_heads(CONFIG.attentions[0])
        caches = kv_memory.allocate(draft, NUM_BLOCKS, fmt)
        hidden = kv_memory.allocate_block_hidden(draft, NUM_BLOCKS, fmt)
        ranks.append(
            RankKv(
                [heads] * CONFIG.num_layers,
                kv_memory.allocate(LayerKv.of_decoder(CONFIG, shard), NUM_BLOCKS, fmt),
                {"mtp": [DraftLayerKv(heads, *layer) for layer in zip(caches, hidden, strict=True)]},
            )
        )
    return ranks


def arrays(rank: RankKv) -> list[np.ndarray[Any, Any]]:
    """All tensors of a rank, hidden rows last."""
    caches = [*rank.caches, *rank.caches_of("mtp")]
    parts = [part for c in caches for part in (c.k, c.v, c.k_scale, c.v_scale) if part is not None]
    return [device().read(part) for part in [*parts, *rank.hidden_of("mtp")]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_rank_has_its_heads_of_the_pages_of_one(fmt: KvCacheFormat, size: int) -> None:
    [alone], ranks = ranks_of(1, fmt), ranks_of(size, fmt)
    rng = np.random.default_rng(0)
    for array in arrays(alone):
        array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
    one, several = KvPages([alone]), KvPages(ranks)
    assert several.num_layers == one.num_layers == CONFIG.num_layers + NUM_DRAFT_LAYERS
    assert several.num_target_layers == CONFIG.num_layers
    assert several.host_bytes == sum(array.nbytes for rank in ranks for array in arrays(rank))
    for layer in range(one.num_layers):
        assert several.page_bytes(layer) == one.page_bytes(layer)
        for block in (0, 2):
            several.write(layer, block, memoryview(np.concatenate(one.read_all(layer, [block])[0]).tobytes()))
            assert all(piece.flags.c_contiguous for piece in several.read_all(layer, [block])[0])
            assert np.concatenate(several.read_all(layer, [block])[0]).tobytes() == b"".join(
                piece.tobytes() for piece in one.read_all(layer, [block])[0]
            )
    for rank in ranks:
        for mine, whole in zip(arrays(rank), arrays(alone), strict=True):
            heads = slice(None) if mine.ndim == 2 else slice(rank.kv_heads[0].start, rank.kv_heads[0].stop)
            for block in (0, 2):
                assert mine[block].tobytes() == whole[block, heads].tobytes()
            assert not mine[1].view(np.uint8).any()


def test_two_holders_of_a_file_see_the_same_pieces() -> None:
    shapes = [((3, 5), np.float32), ((2, ALIGNMENT), np.int8), ((7,), np.uint16)]
    fd = create_kv_file()
    files = [KvFile(fd, 4 * ALIGNMENT) for _ in range(2)]
    with pytest.raises(PermissionError):  # another length than the first one's
        KvFile(fd, 3 * ALIGNMENT)
    os.close(fd)
    mine, theirs = ([file.zeros(*shape) for shape in shapes] for file in files)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert not b.any()
        a[...] = i + 1
    assert all((b == i + 1).all() for i, b in enumerate(theirs))
    assert all(piece.ctypes.data % ALIGNMENT == 0 for piece in [*mine, *theirs])
    with pytest.raises(AssertionError, match="a piece of 1 bytes where 0 are left"):
        files[0].zeros((1,), np.int8)
