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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.command import OUTPUT_DIR, Command, Progress
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

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON = {"hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16"}

# config.json of published models, as far as it decides shapes and arithmetic.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "attention_bias": False, "use_sliding_window": False,
    },
    "ernie4_5-0.3b": _COMMON
    | {
        "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "vocab_size": 103424, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "use_bias": False,
    },
    "llama-3.2-1b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_SCALING, "attention_bias": False, "mlp_bias": False,
    },
}  # fmt: skip


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
    _write_weights(folder, dict(tensor_shapes(config)), np.random.default_rng(seed))


def add_mtp_layer(checkpoint: Path, seed: int = 1) -> None:
    """Add one multi-token-prediction layer with random weights, as `checkpoint`/mtp; it appears only when complete.

    Its drafts are right by chance only, but cost what such a layer costs.

    Raises:
        ConfigError: there is no checkpoint, or it has an mtp folder.
    """
    out = checkpoint / "mtp"
    if out.exists() or not (checkpoint / "config.json").is_file():
        raise ConfigError(f"checkpoint: expected a checkpoint without an mtp folder, got {checkpoint}")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    with complete_folder(out) as partial:
        _write_json(partial / "config.json", config | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1})
        _write_weights(partial, dict(_mtp_tensors(config)), np.random.default_rng(seed))


def ensure_checkpoint(engine_argv: Sequence[str]) -> None:
    """Write the random checkpoint that the engine's options name, `build/bench/checkpoints/<shape>`, if it is missing.

    It has an MTP layer too; one that was written without gets it. A configuration that cannot be read names none.
    """
    setting = read_command_line(engine_argv, "python -m benchmarks", "", Faults()).get("model")
    path = Path(str(setting.value)) if setting is not None else Path()
    if path.parent != CHECKPOINT_DIR or path.name not in SHAPES:
        return
    missing = [part for part in (path, path / "mtp") if not part.exists()]
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


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _layer_tensors(f"model.layers.{layer}", config)
    yield "model.norm.weight", (hidden,)


def _mtp_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same for one MTP layer, in ERNIE's names: it shares the target's embedding, final norm and head."""
    hidden = config["hidden_size"]
    yield "model.mtp_emb_norm.0.weight", (hidden,)
    yield "model.mtp_hidden_norm.0.weight", (hidden,)
    yield "model.mtp_linear_proj.0.weight", (hidden, 2 * hidden)
    yield from _layer_tensors("model.mtp_block.0", config)


def _layer_tensors(root: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder layer; the three families name its tensors alike, Qwen3 adds the head norms."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield f"{root}.input_layernorm.weight", (hidden,)
    yield f"{root}.self_attn.q_proj.weight", (q_size, hidden)
    yield f"{root}.self_attn.k_proj.weight", (kv_size, hidden)
    yield f"{root}.self_attn.v_proj.weight", (kv_size, hidden)
    yield f"{root}.self_attn.o_proj.weight", (hidden, q_size)
    if config["model_type"] == "qwen3":
        yield f"{root}.self_attn.q_norm.weight", (dim,)
        yield f"{root}.self_attn.k_norm.weight", (dim,)
    yield f"{root}.post_attention_layernorm.weight", (hidden,)
    yield f"{root}.mlp.gate_proj.weight", (inner, hidden)
    yield f"{root}.mlp.up_proj.weight", (inner, hidden)
    yield f"{root}.mlp.down_proj.weight", (hidden, inner)


def _write_weights(folder: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    values = _RandomValues(rng)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            if len(shape) == 1:
                file.write(to_bf16(np.ones(shape, np.float32)).data)  # norms scale by 1
            else:
                values.write(file, int(np.prod(shape, dtype=np.int64)))


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
