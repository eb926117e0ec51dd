"""The checkpoint that all peers run: Qwen3-0.6B's exact shape, with weights that make it count.

Speed depends on shapes and bytes, not on what a model has learned, so most weights are random. A few are set so that
greedy decoding answers token t with t + 1, by a margin that survives 4-bit weights in any peer's rounding. So every
peer must produce the same tokens, which shows that the conversions are right, and what a drafting method can guess is
known: a prompt that holds a stretch of the count, with some tokens changed, is a text to be copied with edits.

How it counts: token t's embedding is cos and sin of t times 511 frequencies. The last layer's MLP turns each of these
pairs by one token's angle and adds the result with a larger weight than the embedding has; the head, which is the
embedding table, then finds t + 1. The other layers' outputs are scaled down to noise.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.checkpoint import complete_folder, write_checkpoint
from benchmarks.peers.counting import FIRST_TOKEN, NUM_TOKENS
from fastdeploy_sd.ops.bf16 import to_bf16
from fastdeploy_sd.types import F32, U16

SHAPE = "qwen3-0.6b"
# Every embedding has this value in its first place: it opens the gates of the last MLP.
_CONSTANT = 3.0
_OTHER_LAYERS_SCALE = 0.05
_GATE_WEIGHT = 2.0
_NEXT_TOKEN_WEIGHT = 0.25
_NOISE = 1e-3


def make_counting_checkpoint(out: Path) -> None:
    """Write the checkpoint; it appears under its name only when complete.

    Raises:
        ConfigError: `out` exists.
    """
    with complete_folder(out) as folder:
        write_checkpoint(SHAPE, folder)
        with _open_tensors(folder / "model.safetensors") as tensors:
            for name, values in tensors.items():
                _set_weights(name, values)


@contextmanager
def _open_tensors(path: Path) -> Iterator[dict[str, U16]]:
    """Map a safetensors file of bfloat16 tensors into memory, writable."""
    with open(path, "r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
        header_bytes = int.from_bytes(view[:8], "little")
        header = json.loads(view[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        data: U16 = np.frombuffer(view, np.uint16, offset=8 + header_bytes)
        yield {
            name: data[info["data_offsets"][0] // 2 : info["data_offsets"][1] // 2].reshape(info["shape"])
            for name, info in header.items()
        }
        view.flush()


def _set_weights(name: str, values: U16) -> None:
    """Overwrite one tensor, bf16 bits, where counting needs other values than random ones."""
    rng = np.random.default_rng(values.shape[0])
    if name == "model.embed_tokens.weight":
        values[:] = 0
        values[FIRST_TOKEN : FIRST_TOKEN + NUM_TOKENS] = to_bf16(embeddings(values.shape[1]))
    elif name == "model.norm.weight":
        values[:2] = 0  # the constant says nothing about the token
    elif name.startswith("model.layers.27.mlp."):
        weights = rng.standard_normal(values.shape, np.float32) * np.float32(_NOISE)
        set_mlp(name.split(".")[-2], weights)
        values[:] = to_bf16(weights)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        bits = values.astype(np.uint32) << 16
        values[:] = to_bf16(bits.view(np.float32) * np.float32(_OTHER_LAYERS_SCALE))


def _frequencies(hidden_size: int) -> npt.NDArray[np.float64]:
    """Radians per token of every pair but the first: different whole numbers of turns per count."""
    turns = np.random.default_rng(0).choice(np.arange(1, NUM_TOKENS // 2), hidden_size // 2 - 1, replace=False)
    angles: npt.NDArray[np.float64] = turns * (2 * np.pi / NUM_TOKENS)
    return angles


def embeddings(hidden_size: int) -> F32:
    """f32[NUM_TOKENS, hidden_size]: the constant, 0, then cos and sin per frequency."""
    angles = np.outer(np.arange(NUM_TOKENS), _frequencies(hidden_size))
    rows = np.zeros((NUM_TOKENS, hidden_size), np.float32)
    rows[:, 0] = _CONSTANT
    rows[:, 2::2], rows[:, 3::2] = np.cos(angles), np.sin(angles)
    return rows


def set_mlp(projection: str, weights: F32) -> None:
    """Let the MLP add the embedding of the next token; `weights` are f32[out, in] of one projection."""
    hidden_size = min(weights.shape)
    size = hidden_size - 2
    if projection == "gate_proj":
        weights[:size, 0] = _GATE_WEIGHT
    elif projection == "up_proj":
        angles = _frequencies(hidden_size)
        even, odd = np.arange(0, size, 2), np.arange(1, size, 2)
        weights[even, even + 2], weights[even, odd + 2] = np.cos(angles), -np.sin(angles)
        weights[odd, even + 2], weights[odd, odd + 2] = np.sin(angles), np.cos(angles)
    else:
        weights[np.arange(2, hidden_size), np.arange(size)] = _NEXT_TOKEN_WEIGHT
