"""Writes checkpoints of a real model's exact shape with random weights, for measuring speed without a download.

How fast a model runs depends on its shapes and bytes, not on what it has learned. Knows Hugging Face's layout on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedWriter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.command import OUTPUT_DIR, Command, Progress
from benchmarks.shapes import MTP_FOLDER_FAMILIES, SHAPES, TensorShape, mtp_folder_tensors, tensor_shapes
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.sources import read_command_line
from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.ops.bf16 import to_bf16

CHECKPOINT_DIR = OUTPUT_DIR / "checkpoints"
WEIGHT_STD = 0.02
# Prime, so that no two rows of a matrix are the same: row lengths are never a multiple of it.
BLOCK_SIZE = 1_048_583
_BLOCK_COPIES = 8
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# An MXFP4 scale is 2^(byte - 127); these make weights of about WEIGHT_STD.
_MXFP4_SCALE = 120


def main(argv: Sequence[str]) -> int:
    """`bench checkpoint`: write one and print its path."""
    command = Command("checkpoint", "Write a checkpoint of a real model's exact shape with random weights.")
    command.add_argument("shape", metavar="SHAPE", help=f"one of {', '.join(SHAPES)}")
    command.add_argument("out", metavar="OUT_DIR", type=Path, help="directory to create")
    command.number("--seed", 0, "of the weights", least=0)
    command.add_argument("--tokenizer", metavar="DIR", type=Path, help="checkpoint to copy the tokenizer of")
    text = "also write OUT_DIR/mtp: one multi-token-prediction layer, for the methods that draft with it"
    command.add_argument("--mtp", action="store_true", help=text)
    args = command.read(argv)
    make_checkpoint(args.shape, args.out, args.seed, args.tokenizer)
    if args.mtp:
        add_mtp_layer(args.out, args.seed + 1)
    print(args.out)
    return 0


def make_checkpoint(shape: str, out: Path, seed: int = 0, tokenizer: Path | None = None) -> None:
    """Write a checkpoint; it appears under its name only when complete.

    Weights are N(0, 0.02) in bfloat16: one random block repeated over all matrices, which is enough because memory and
    arithmetic are as fast for repeated values as for others, and because quantisation only looks at 128 at a time.

    Args:
        shape: a key of SHAPES.
        out: directory to create.
        tokenizer: checkpoint whose tokenizer is copied (its vocabulary may be smaller), None = the bundled model's.

    Raises:
        ConfigError: unknown shape, `out` exists, or the tokenizer is missing.
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape: expected one of {', '.join(SHAPES)}, got {shape!r}{suggest(shape, SHAPES)}")
    with complete_folder(out) as partial:
        write_checkpoint(shape, partial, seed, tokenizer)


def write_checkpoint(shape: str, folder: Path, seed: int = 0, tokenizer: Path | None = None) -> None:
    """Write a checkpoint's files into a folder; see `make_checkpoint`."""
    source = ModelConfig(DEMO_MODEL).path if tokenizer is None else tokenizer
    config = {**SHAPES[shape], **_copy_tokenizer(source, folder)}
    _write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in _TOKEN_ID_KEYS if key in config}
    _write_json(folder / "generation_config.json", token_ids)
    _write_weights(folder, list(tensor_shapes(config)), np.random.default_rng(seed))


def add_mtp_layer(checkpoint: Path, seed: int = 1) -> None:
    """Add one multi-token-prediction layer with random weights, as `checkpoint`/mtp; it appears only when complete.

    Its drafts are right by chance only, but cost what such a layer costs.

    Raises:
        ConfigError: there is no checkpoint, it has an mtp folder, or its family has its own names for such layers.
    """
    out = checkpoint / "mtp"
    if out.exists() or not (checkpoint / "config.json").is_file():
        raise ConfigError(f"checkpoint: expected a checkpoint without an mtp folder, got {checkpoint}")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in MTP_FOLDER_FAMILIES:
        expected = ", ".join(MTP_FOLDER_FAMILIES)
        raise ConfigError(f"model_type: expected one of {expected} for an mtp folder, got {config['model_type']}")
    with complete_folder(out) as partial:
        _write_json(partial / "config.json", config | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1})
        _write_weights(partial, list(mtp_folder_tensors(config)), np.random.default_rng(seed))


def ensure_checkpoint(engine_argv: Sequence[str]) -> None:
    """Write the random checkpoint that the engine's options name, `build/bench/checkpoints/<shape>`, if it is missing.

    Where its family may have an MTP folder, it gets one. A configuration that cannot be read names none.
    """
    setting = read_command_line(engine_argv, "python -m benchmarks", "", Faults()).get("model")
    path = Path(str(setting.value)) if setting is not None else Path()
    if path.parent != CHECKPOINT_DIR or path.name not in SHAPES:
        return
    wanted = [path, path / "mtp"] if SHAPES[path.name]["model_type"] in MTP_FOLDER_FAMILIES else [path]
    missing = [part for part in wanted if not part.exists()]
    if missing:
        progress = Progress(len(missing), f"writing a random checkpoint: {path.name}")
    if path in missing:
        make_checkpoint(path.name, path)
        progress.advance()
    if path / "mtp" in missing:
        add_mtp_layer(path)
        progress.advance()


@contextmanager
def complete_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which gets the name `out` when the block has ended without an error.

    Raises:
        ConfigError: `out` exists.
    """
    if out.exists():
        raise ConfigError(f"out: expected a directory to create, got {out}, which exists")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_tokenizer(source: Path, target: Path) -> dict[str, Any]:
    """Copy the tokenizer's files and return its special token ids as config.json entries."""
    if not (source / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer: expected a directory with tokenizer.json, got {source}")
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {key: config[key] for key in _TOKEN_ID_KEYS if config.get(key) is not None}


def _write_weights(folder: Path, tensors: Sequence[TensorShape], rng: np.random.Generator) -> None:
    values = _RandomValues(rng)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims, dtype in tensors:
        begin, end = end, end + (2 if dtype == "BF16" else 1) * prod(dims)
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims, dtype in tensors:
            if name.endswith("_scales"):
                file.write(bytes([_MXFP4_SCALE]) * prod(dims))
            elif dtype == "U8":
                file.write(rng.bytes(prod(dims)))
            elif len(dims) == 1 and not name.endswith(("bias", "sinks", "A_log")):
                file.write(to_bf16(np.ones(dims, np.float32)).data)  # norms scale by 1
            else:
                values.write(file, prod(dims))


class _RandomValues:
    """An endless sequence of bfloat16 values that repeats every BLOCK_SIZE elements; each tensor continues it."""

    def __init__(self, rng: np.random.Generator) -> None:
        block = to_bf16(rng.standard_normal(BLOCK_SIZE, np.float32) * np.float32(WEIGHT_STD))
        self._values: npt.NDArray[np.uint16] = np.tile(block, _BLOCK_COPIES)
        self._position = 0

    def write(self, file: BufferedWriter, count: int) -> None:
        """Write the next `count` values."""
        while count > 0:
            piece = self._values[self._position : self._position + count]
            file.write(piece.data)
            count -= piece.size
            self._position = (self._position + piece.size) % BLOCK_SIZE


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
