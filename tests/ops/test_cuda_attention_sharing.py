"""What requests share is read once for a group, with the bits of every request alone; emulated, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.program.program import Padding, Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.ops import attention as ops
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.kv_cache import KvCache, RequestBlocks
from fastdeploy_sd.ops.reference import attention as reference
from tests.ops.cases.attention import batch, select, share, with_prefixes
from tests.ops.cases.trees import random_tree
from tests.ops.cuda_device import OpRunner, emulated
from tests.ops.cuda_layouts import LAYOUTS
from tests.ops.test_cuda_attention import CACHES, dtype_of, over

pytestmark = pytest.mark.slow

# Tokens in the cache before, and new ones. Requests 0 to 4 share up to a border of a partition, 5 and 6 up to behind
# one, 7 and 8 up to before one; 9 and 10 have more rows than may share, 11 is alone.
REQUESTS = [(512, 1), (600, 8), (515, 3), (512, 2), (700, 1), (300, 5), (257, 1)]
REQUESTS += [(530, 1), (600, 4), (300, 9), (300, 20), (40, 1)]
SHARING = [([0, 1, 2, 3, 4, 9], 512), ([5, 6, 10], 272), ([7, 8], 496)]


def grouped(cache: str, *, first_key: int = 0) -> dict[str, Any]:
    args = batch(REQUESTS, 8, 1, 32, 16, dtype_of(cache))
    for members, num_tokens in SHARING:
        args = share(args, members, num_tokens)
    return over(cache, {**args, "cache": type(args["cache"])(args["cache"].k, args["cache"].v, first_key)})


def widened(args: dict[str, Any], num_columns: int) -> dict[str, Any]:
    """The same call over tables of requests that could be as long: what is shared is then merged at once."""
    rows, tables = args["blocks"]
    more = np.full((len(tables), num_columns - tables.shape[1]), -1, np.int32)
    return {**args, "blocks": RequestBlocks(rows, np.concatenate([tables, more], axis=1))}


@pytest.mark.parametrize("cache", CACHES)
def test_sharing_changes_no_bit(device: OpRunner, cache: str) -> None:
    """Neither in a chain nor in a tree, however partitions are computed."""
    args = grouped(cache, first_key=3 if cache == "float8" else 0)
    rng = np.random.default_rng(1)
    masks = np.concatenate([random_tree(rng, count) for count in np.diff(args["query_start_loc"])])
    found = with_prefixes(args)["prefixes"]
    np.testing.assert_array_equal(found.shared_partitions, [2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0])
    ways = [(args, masks), (widened(args, 1 << 17), None)]
    if cache == "bf16":
        ways += [(widened(args, 8000), masks), (select(args, rng.permutation([*range(12)] * 2).tolist()), None)]
    for way, mask in ways:
        with device.runs_ops():
            want = ops.cascade_append_attention(**way, tree_mask=mask)
            got = ops.cascade_append_attention(**with_prefixes(way), tree_mask=mask)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("num_columns", [40, 1 << 18])
@pytest.mark.parametrize("count", [2, 9])
def test_a_prefix_is_read_once_per_tile_of_a_group(count: int, num_columns: int, tile_rows: int) -> None:
    """Of 16 query rows, or on Hopper 64: those of two or eight requests of one row and eight heads."""
    device = emulated()
    num_before, row_bytes = 520, 2 * 32
    args = widened(share(batch([(num_before, 1)] * count, 16, 2, 32, 16, np.uint16), range(count), 512), num_columns)
    read = []
    for way in (args, with_prefixes(args)):
        with device.emulates(90 if tile_rows == 64 else 100), device.runs_ops():
            ops.cascade_append_attention(**way)
        read.append({device.bytes_read[name] for name in ("k", "v")})
    num_tiles = -(-count * 8 // tile_rows)
    alone, together = (num_before + 1) * count, 512 * num_tiles + (num_before + 1 - 512) * count
    assert read == [{2 * row_bytes * alone}, {2 * row_bytes * together}]


def test_any_number_of_requests_is_compared(device: OpRunner) -> None:
    """Of more than find room in shared memory, five are long enough to share: two groups and one alone."""
    count, block_size, longest = 4100, 64, 600
    lengths, long_ones = np.ones(count, np.int32), [3, 700, 4095, 4096, 4099]
    lengths[long_ones] = [300, longest, 300, longest, longest]
    tables = np.zeros((count, -(-longest // block_size)), np.int32)
    tables[[3, 4095]], tables[[700, 4099]], tables[4096] = 1, 2, 3
    blocks: RequestBlocks[np.ndarray] = RequestBlocks(np.arange(count, dtype=np.int32), tables)
    args: dict[str, Any] = {
        "query_start_loc": np.arange(count + 1, dtype=np.int32),
        "seq_lens": lengths,
        "blocks": blocks,
    }
    want = reference.find_shared_prefixes(**args, block_size=block_size, group_size=8)
    assert sorted(want.shared_partitions[long_ones].tolist()) == [0, 1, 1, 2, 2]
    with device.runs_ops():
        found = ops.find_shared_prefixes(**args, block_size=block_size, group_size=8)
    for name, one, other in zip(want._fields, found, want, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


class Layers:
    """A pass of two layers of attention as a graph, over requests of a row each."""

    def __init__(self, gpu: CudaDevice, args: dict[str, Any]) -> None:
        recorder, count, num_kv_heads = Recorder(), Size("num_requests"), args["cache"].num_kv_heads
        arrays = {name: args[name] for name in ("query_start_loc", "seq_lens")} | args["blocks"]._asdict()
        shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(arrays, (count,)) | {"query_start_loc": (count + 1,)}
        shapes["block_tables"] = arrays["block_tables"].shape
        columns: dict[str, Any] = {name: recorder.add_input(name, paddle.int32, shapes[name]) for name in arrays}
        indices: Any = recorder.add_input("indices", paddle.int32, (count,))
        padding: Padding = {"indices": 0, "seq_lens": 0, "table_rows": 0, "query_start_loc": "last"}
        cache = args["cache"]
        layout = LAYOUTS["cascade_append_attention"]
        k, v = (gpu.wrap(layout[name][0](x, None).reshape(x.shape)) for name, x in (("k", cache.k), ("v", cache.v)))
        q = gather_output_rows(gpu.wrap(args["q"]), indices)
        blocks = RequestBlocks(columns["table_rows"], columns["block_tables"])
        own = columns["query_start_loc"], columns["seq_lens"], blocks
        found = ops.find_shared_prefixes(*own, cache.block_size, q.shape[1] // cache.head_dim // num_kv_heads)
        for _ in range(2):
            q = ops.cascade_append_attention(q, KvCache(k, v), *own, args["scale"], found)
        recording = Recording(recorder, (q,), {"num_requests": len(args["q"])}, padding)
        self.gpu, self.mirrors = gpu, {name: gpu.buffer(array.copy()) for name, array in arrays.items()}
        self.mirrors["indices"] = gpu.buffer(np.arange(len(args["q"]), dtype=np.int32))
        self.program = gpu.program(recording, {name: mirror.tensor for name, mirror in self.mirrors.items()})

    def run(self, tables: np.ndarray, count: int) -> np.ndarray:
        self.mirrors["block_tables"].array[...] = tables
        for mirror in self.mirrors.values():
            mirror.upload()
        self.program.run({"num_requests": count})
        y: np.ndarray = self.gpu.read(self.program.outputs[0])
        return y[:count]


def test_groups_of_any_size_are_one_graph(device: OpRunner, gpu: CudaDevice) -> None:
    """What is shared changes from step to step; a graph has one number of blocks."""
    args = batch([(600, 1), (530, 1), (300, 1), (520, 1), (515, 1), (270, 1)], 8, 1, 16, 16, np.uint16)
    layers = Layers(gpu, args)
    all_six, steps = [[*range(6)]], list[tuple[list[list[int]], int]]()
    steps += [([], 6), (all_six, 6), ([[0, 3]], 6), ([[0, 1], [3, 4]], 5), (all_six, 5), ([], 6)]
    for groups, count in steps:
        step = args
        for members in groups:
            step = share(step, members, 512 if len(members) < 6 else 256)
        alone = select(step, range(count))
        assert (np.diff(with_prefixes(alone)["prefixes"].group_starts) > 0).sum() == len(groups)
        with device.runs_ops():
            for _ in range(2):
                alone["q"] = ops.cascade_append_attention(**alone)
        got = layers.run(step["blocks"].block_tables, count)
        np.testing.assert_array_equal(got, alone["q"])
    assert len(layers.program._graphs) == 1
