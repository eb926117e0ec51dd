"""The ops that `bench gpu-kernels` times, at the sizes that docs/benchmarks.md asks about. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_bounds import Numbers
from benchmarks.gpu_peers import AttentionWork, LinearWork, SamplingWork, Work
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.program.declaration import BF16, ELEMENT_BYTES
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.ops.attention import CASCADE_APPEND_ATTENTION, FIND_SHARED_PREFIXES
from fastdeploy_sd.ops.group_format import GROUP_FORMATS
from fastdeploy_sd.ops.linear import LINEAR
from fastdeploy_sd.ops.linear_format import LINEAR_FORMATS, LinearFormat, format_code
from fastdeploy_sd.ops.packing import pack_linear, packed_bytes
from fastdeploy_sd.ops.sampling import SAMPLE
from fastdeploy_sd.ops.verification import VERIFY_DRAFT_TOKENS

_PACKED_COLUMNS = 1024  # from random weights; the matrix repeats their panels
_BF16_BYTES = 2
# Format of a linear layer's weights -> what its kernels multiply. Of integers with groups: those of common files.
NUMBERS: Mapping[LinearFormat, Numbers] = {
    "bfloat16": "bfloat16", "wint8": "int8", "wint4": "int8", "fp8": "fp8", "e4m3": "bfloat16",
    "q4_0": "int8", "q8_0": "int8", "q4_k": "int8", "q6_k": "int8", "int4_g128": "int8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """How large the cases are.

    Attributes:
        requests, rows: of the sampled and verified step.
        attention_requests: of the verified step whose attention is timed.
        contexts: keys of each of its requests.
        prefixes: keys of each of its requests, and how many of them all requests share.
        chunk: tokens of the prompt's chunk.
        linear_rows: numbers of rows of the linear layers, of features [in, out].
    """

    vocab_size: int
    requests: int
    rows: int
    attention_requests: int
    attention_rows: Sequence[int]
    contexts: Sequence[int]
    prefixes: Sequence[tuple[int, int]]
    chunk: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_rows: Sequence[int]
    in_features: int
    out_features: int


WANTED_SIZES = GpuSizes(
    vocab_size=151_936,
    requests=256,
    rows=6,
    attention_requests=64,
    attention_rows=(1, 8),
    contexts=(4096, 8192, 32_768),
    prefixes=((8192, 4096), (8192, 7680)),
    chunk=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    linear_rows=(1, 16, 64, 2048, 8192),
    in_features=4096,
    out_features=4096,
)
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class GpuCase:
    """One thing that is timed.

    Attributes:
        kind: sampling, attention or linear.
        text: what distinguishes it from others of its kind.
        bind: takes memory of a device and returns ops in order, on one stream.
        num_bytes: that must be read and written at least, once.
        num_operations: multiplications and additions; 0 where bytes are what counts.
        numbers: that are multiplied.
        work: the same for other projects' kernels, None where they have none for it.
        num_issued: operations of the matrix instructions for that, whose rows come in eights; 0 = no more.
    """

    kind: str
    text: str
    bind: Callable[[Any], Sequence[BoundCall]]
    num_bytes: int
    num_operations: int
    numbers: Numbers = "bfloat16"
    work: Work | None = None
    num_issued: int = 0


def gpu_cases(kinds: Sequence[str], sizes: GpuSizes) -> Iterator[GpuCase]:
    """Return the cases; each takes memory when it is bound."""
    for kind in kinds:
        yield from KINDS[kind](sizes)


def _bound(
    device: Any, op: HostOp, arguments: Mapping[str, Any], outputs: Mapping[str, tuple[Any, Any]]
) -> tuple[BoundCall, dict[str, Any]]:
    """Bind an op to arrays that are copied to the GPU, tensors of it, and zeros for its outputs."""
    placed = {name: device.wrap(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    made = {name: device.zeros(shape, dtype) for name, (shape, dtype) in outputs.items()}
    missing = {name: None for name in op.declaration.arrays if name not in placed and name not in made}
    return device.bind(op, **placed, **made, **missing), made


def _sampling(sizes: GpuSizes) -> Iterator[GpuCase]:
    vocab = sizes.vocab_size
    rng = np.random.default_rng(0)
    few = rng.standard_normal((8, vocab), np.float32) * 2
    for row in few:  # some tokens are far above the others, as a model's are
        row[rng.choice(vocab, min(40, vocab), replace=False)] += 9
    flat = rng.standard_normal((8, vocab), np.float32)
    settings: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top_p 0.9": {"top_p": 0.9},
        "top_k 50": {"top_k": 50},
    }
    settings["top_k 50, top_p 0.9"] = {"top_k": 50, "top_p": 0.9}
    for text, columns in settings.items():
        yield _sampled(sizes, few, text, columns)
    yield _sampled(sizes, flat, "top_p 0.9, flat", {"top_p": 0.9})


def _sampled(sizes: GpuSizes, few: npt.NDArray[np.float32], text: str, columns: Mapping[str, float]) -> GpuCase:
    num_rows = sizes.requests * sizes.rows
    num_bytes = num_rows * sizes.vocab_size * ELEMENT_BYTES["float32"]
    chosen = columns.get("temperature", 1.0), int(columns.get("top_k", 0)), columns.get("top_p", 1.0)
    work = SamplingWork(few, num_rows, *chosen)
    shape = f"{sizes.requests} requests x {sizes.rows} rows, {text}"
    return GpuCase("sampling", shape, partial(_bind_sampling, sizes, few, columns), num_bytes, 0, work=work)


def _bind_sampling(
    sizes: GpuSizes, few: npt.NDArray[np.float32], columns: Mapping[str, float], device: Any
) -> Sequence[BoundCall]:
    count, num_rows, i32 = sizes.requests, sizes.requests * sizes.rows, np.int32
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    off |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    per_row = {
        name: np.full(count, columns.get(name, value), i32 if name == "top_k" else np.float32)
        for name, value in off.items()
    }
    drafts = np.zeros(count * (sizes.rows - 1), i32)
    starts = {
        "cu_num_logits": np.arange(count + 1, dtype=i32) * sizes.rows,
        "draft_token_ids": drafts,
        "cu_num_draft": np.arange(count + 1, dtype=i32) * (sizes.rows - 1),
    }
    starts = {name: device.wrap(array) for name, array in starts.items()}
    rules = {
        "table_rows": np.arange(count, dtype=i32),
        "count_rows": np.full(count, -1, i32),
        "token_counts": np.zeros((0, sizes.vocab_size), i32),
        "num_bias": np.zeros(count, i32),
        "bias_token_ids": np.zeros((count, 1), i32),
        "bias_values": np.zeros((count, 1), np.float32),
        "cu_mask": np.zeros(num_rows + 1, i32),
        "mask_token_ids": np.zeros(0, i32),
        "allowed_rows": np.full(num_rows, -1, i32),
        "allowed_bits": np.zeros((0, 1), i32),
    }
    rows = {
        "logits": np.resize(few, (num_rows, sizes.vocab_size)),
        "batch_id_per_output": np.repeat(np.arange(count, dtype=i32), sizes.rows),
        "positions": np.arange(num_rows, dtype=i32),
        "seed": np.arange(count, dtype=np.uint64),
    }
    arguments = {**rows, **per_row, **rules, **starts, "stops_at_wrong_draft": True}
    sample, made = _bound(device, SAMPLE, arguments, {"token_ids": ((num_rows,), i32)})
    arguments = {**starts, "sampled_token_ids": made["token_ids"], "accept_policy": 0, "max_candidate_len": 0}
    outputs: dict[str, tuple[Any, Any]] = {"token_ids": ((num_rows,), i32), "cu_num_output": ((count + 1,), i32)}
    outputs["output_rows"] = ((num_rows,), i32)
    outputs |= {"num_accepted": ((count,), i32), "num_failed": ((1,), i32)}
    verify, _ = _bound(device, VERIFY_DRAFT_TOKENS, {**arguments, "verify_window": 0}, outputs)
    return sample, verify


def _attention(sizes: GpuSizes) -> Iterator[GpuCase]:
    heads = sizes.heads, sizes.kv_heads, sizes.head_dim
    for context in sizes.contexts:
        for rows in sizes.attention_rows:
            yield _attended(sizes, AttentionWork(sizes.attention_requests, rows, context, *heads))
    yield _attended(sizes, AttentionWork(1, sizes.chunk, sizes.chunk, *heads))
    for context, prefix in sizes.prefixes:
        for rows in sizes.attention_rows:
            yield _attended(sizes, AttentionWork(sizes.attention_requests, rows, context, *heads, prefix))


def _attended(sizes: GpuSizes, work: AttentionWork) -> GpuCase:
    requests, rows, context = work.requests, work.rows, work.context
    # A row sees the keys up to its own.
    keys = requests * (rows * context - rows * (rows - 1) // 2)
    cached = work.prefix + requests * (context - work.prefix)
    width, num_heads = sizes.kv_heads * sizes.head_dim, sizes.heads * sizes.head_dim
    moved = 2 * (cached * width + requests * rows * num_heads) * _BF16_BYTES
    text = f"{requests} requests x {rows} rows, context {context}, {sizes.heads}:{sizes.kv_heads} heads"
    text += f", {work.prefix} shared" if work.prefix > 0 else ""
    return GpuCase("attention", text, partial(_bind_attention, sizes, work), moved, 4 * keys * num_heads, work=work)


def _bind_attention(sizes: GpuSizes, work: AttentionWork, device: Any) -> Sequence[BoundCall]:
    requests, rows, context, i32 = work.requests, work.rows, work.context, np.int32
    blocks_each, num_shared = -(-context // BLOCK_SIZE), work.prefix // BLOCK_SIZE
    num_blocks = num_shared + requests * (blocks_each - num_shared)
    blocks = np.random.default_rng(0).permutation(num_blocks).astype(i32)
    own = blocks[num_shared:].reshape(requests, blocks_each - num_shared)
    # The declared shapes are the CPU's layout; a GPU's has as many bytes.
    keys_shape = (num_blocks, sizes.kv_heads, sizes.head_dim // 2, BLOCK_SIZE, 2)
    values_shape = (num_blocks, sizes.kv_heads, BLOCK_SIZE // 2, sizes.head_dim, 2)
    step = {
        "table_rows": np.arange(requests, dtype=i32),
        "block_tables": np.concatenate([np.tile(blocks[:num_shared], (requests, 1)), own], axis=1),
        "query_start_loc": np.arange(requests + 1, dtype=i32) * rows,
        "seq_lens": np.full(requests, context, i32),
    }
    arguments = {
        **step,
        "k": device.zeros(keys_shape, np.uint16),
        "v": device.zeros(values_shape, np.uint16),
        "q": device.zeros((requests * rows, sizes.heads * sizes.head_dim), np.uint16),
        "scale": sizes.head_dim**-0.5,
        "softcap": 0.0,
        "first_key": 0,
        "window": 0,
        **(_shared_prefixes(device, sizes, step, requests) if work.prefix > 0 else {}),
    }
    outputs = {"y": ((requests * rows, sizes.heads * sizes.head_dim), np.uint16)}
    call, _ = _bound(device, CASCADE_APPEND_ATTENTION, arguments, outputs)
    return (call,)


def _shared_prefixes(device: Any, sizes: GpuSizes, step: Mapping[str, Any], requests: int) -> dict[str, Any]:
    """Find what the requests share, once, as a pass does for all of its layers."""
    arguments = {**step, "block_size": BLOCK_SIZE, "group_size": sizes.heads // sizes.kv_heads}
    outputs: dict[str, tuple[Any, Any]] = {"group_rows": ((requests, 64), np.int32)}
    outputs |= {"group_starts": ((requests + 1,), np.int32)}
    for name in ("group_leaders", "group_places", "shared_partitions"):
        outputs[name] = ((requests,), np.int32)
    find, found = _bound(device, FIND_SHARED_PREFIXES, arguments, outputs)
    find.run()
    return found


def _linear(sizes: GpuSizes) -> Iterator[GpuCase]:
    for fmt in NUMBERS:
        for rows in sizes.linear_rows:
            yield _multiplied(sizes, fmt, rows)


@cache
def _packed(fmt: LinearFormat, in_features: int, out_features: int) -> np.ndarray:
    columns = min(out_features, _PACKED_COLUMNS)
    if fmt in GROUP_FORMATS and fmt not in LINEAR_FORMATS:  # what the numbers are costs nothing
        return np.zeros(packed_bytes(in_features, out_features, fmt), np.uint8)
    weight = np.random.default_rng(0).standard_normal((columns, in_features), np.float32)
    return np.resize(pack_linear(weight, fmt).data, packed_bytes(in_features, out_features, fmt))


def _multiplied(sizes: GpuSizes, fmt: LinearFormat, rows: int) -> GpuCase:
    in_features, out_features, bind = sizes.in_features, sizes.out_features, partial(_bind_linear, sizes, fmt, rows)
    moved = packed_bytes(in_features, out_features, fmt) + rows * (in_features + out_features) * _BF16_BYTES
    text, of_row = f"{fmt} {in_features}x{out_features}, {rows} rows", 2 * in_features * out_features
    # They have none that means the same in fewer bits.
    work = LinearWork(rows, in_features, out_features) if fmt == "bfloat16" else None
    return GpuCase("linear", text, bind, moved, rows * of_row, NUMBERS[fmt], work, -(-rows // 8) * 8 * of_row)


def _bind_linear(sizes: GpuSizes, fmt: LinearFormat, rows: int, device: Any) -> Sequence[BoundCall]:
    weights = device.wrap(_packed(fmt, sizes.in_features, sizes.out_features))
    x = np.full((rows, sizes.in_features), 0x3F80, np.uint16)
    numbers = {"in_features": sizes.in_features, "out_features": sizes.out_features, "format": format_code(fmt)}
    arguments = {"x": x, "packed": weights, **numbers, "num_slices": 1, "slice_unit": 1, "y_dtype": BF16}
    call, _ = _bound(device, LINEAR, arguments, {"y": ((rows, sizes.out_features), np.uint16)})
    return (call,)


KINDS: Mapping[str, Callable[[GpuSizes], Iterator[GpuCase]]] = {
    "sampling": _sampling,
    "attention": _attention,
    "linear": _linear,
}
