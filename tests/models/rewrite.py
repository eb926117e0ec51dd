"""Writes altered copies of golden checkpoints."""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from fastdeploy_sd.models.checkpoint import SafetensorsFile
from tests.models import golden

Tensors = dict[str, np.ndarray]
_NUM_TOKENS = 4096  # of every golden model
_NAMES = {np.dtype(np.uint16): "BF16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
_NAMES |= {
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.float16): "F16",
}
_NAMES |= {np.dtype(np.int64): "I64", np.dtype(np.bool_): "BOOL"}


def read(name: str) -> Tensors:
    """Return a golden model's tensors."""
    file = SafetensorsFile(golden.ROOT / name / "model.safetensors")
    return {tensor: np.array(file.tensor(tensor)) for tensor in file.entries}


def stack_experts(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return tensors with those of all experts as one, rows of gate before those of up, as Qwen3.5 is released."""
    found: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        prefix, is_expert, rest = name.partition(".mlp.experts.")
        if is_expert:
            expert, role, _ = rest.split(".")
            stacks.setdefault(f"{prefix}.mlp.experts.{role}", {})[int(expert)] = value
        else:
            found[name] = value
    of_role = {name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in stacks.items()}
    for name, value in of_role.items():
        if name.endswith("down_proj"):
            found[name] = value
        elif name.endswith("gate_proj"):
            up = of_role[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([value, up], axis=1)
    return found


def write_file(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    metadata: dict[str, str] | None = None,
    byte_type: str = "F8_E4M3",
) -> None:
    """Write one safetensors file; u16 becomes BF16, u8 `byte_type`."""
    names = {**_NAMES, np.dtype(np.uint8): byte_type}
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_folder(path: pathlib.Path, name: str, config: Mapping[str, object] | None = None) -> pathlib.Path:
    """Make a copy of a golden folder without its weights; `config` overrides keys of config.json."""
    path.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(golden.ROOT / name / file, path / file)
    write_config(path, name, config or {})
    return path


def write_config(path: pathlib.Path, name: str, config: Mapping[str, object]) -> None:
    """Write a golden model's config.json with some keys overridden."""
    values = json.loads((golden.ROOT / name / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | dict(config)))


def add_windows(folder: pathlib.Path, layer_types: Sequence[str], window: int) -> None:
    """Give a Qwen3 folder's layers of type "sliding_attention" a window."""
    path = folder / "config.json"
    values = {"layer_types": list(layer_types), "sliding_window": window, "use_sliding_window": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(folder: pathlib.Path, num_layers: int, num_tokens: int) -> pathlib.Path:
    """Leave a copy of a golden folder its first decoder layers, its draft layers and its first tokens; return it."""
    config = json.loads((folder / "config.json").read_text())
    first_draft_layer = config["num_hidden_layers"]

    def new_name(name: str) -> str | None:
        """The tensor's, None = it goes; draft layers are numbered on from the decoder's."""
        prefix, layers, rest = name.partition("model.layers.")
        number, dot, role = rest.partition(".")
        if not layers or int(number) < num_layers:
            return name
        moved = int(number) - first_draft_layer + num_layers
        return f"{prefix}{layers}{moved}{dot}{role}" if moved >= num_layers else None

    types = {"layer_types": config["layer_types"][:num_layers]} if config.get("layer_types") else {}
    (folder / "config.json").write_text(json.dumps(config | types | {"num_hidden_layers": num_layers}))
    for path in folder.rglob("config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": num_tokens}))
    for path in folder.rglob("*.safetensors"):
        file = SafetensorsFile(path)
        named = {new_name(name): np.array(file.tensor(name)) for name in file.entries}
        rows = {n: v[:num_tokens] if len(v) == _NUM_TOKENS else v for n, v in named.items() if n is not None}
        write_file(path, rows, {"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < num_tokens}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def to_paddle_names(tensors: Tensors, *, fused: bool) -> Tensors:
    """Rename an ERNIE model as Paddle stores it: `ernie.`, matrices [in, out], q|k|v and gate|up fused if asked."""
    out: Tensors = {}
    for name, value in tensors.items():
        is_matrix = value.ndim == 2 and "embed_tokens" not in name and "moe_statics" not in name
        out[name.replace("model.", "ernie.", 1)] = np.ascontiguousarray(value.T) if is_matrix else value
    if not fused:
        return out
    for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "up_gate_proj")):
        for name in [n for n in out if n.endswith(f".{parts[0]}.weight")]:
            stem = name.removesuffix(f"{parts[0]}.weight")
            out[f"{stem}{whole}.weight"] = np.concatenate([out.pop(f"{stem}{p}.weight") for p in parts], axis=1)
    return out
