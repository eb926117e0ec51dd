"""Damages copies of small checkpoints: their JSON, templates, tensors and the kinds of their files.

A mutant is a function of its seed alone. The values are those that break readers: edges of integers and floats, other
types, other depths, other sizes; the keys are those that config.json is known to have.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.config_fields import FIELDS
from fastdeploy_sd.process.files import read_json
from tests.fuzz import gguf_mutations, quantized_mutations

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_DEMO = Path(__file__).resolve().parents[2] / "fastdeploy_sd" / "demo_model"
_WEIGHTS = "model.safetensors"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
_HUGE = 10**400
_GGUF_SHARE, _QUANTIZED_SHARE = 0.25, 0.25
_EDGES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 8, 16, 17, 31, 64, 127, 255, 1024, 65_536, 2**31 - 1, 2**31, 2**32, 2**63,
    2**64, 10**10, 10**12, _HUGE, -_HUGE, 0.0, -0.0, 0.5, 1.5, 1e-46, 1e-30, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), "", "0", "8", "silu", "auto", "none", "\0", "\ud800", "ü" * 300, "x" * 100_000, [], {}, [[]], [{}],
    [None], [0] * 1000, {"a": {"b": []}}, {"content": 5}, "{{ 1 }}", "../../etc/passwd", "/dev/zero",
)  # fmt: skip
_KEYS = (
    *FIELDS, "architectures", "hidden_act", "rope_scaling", "rope_parameters", "layer_types", "mlp_only_layers",
    "moe_layer_start_index", "moe_layer_end_index", "num_nextn_predict_layers", "quantization_config", "is_quantized",
    "no_rope_layers", "use_sliding_window", "eos_token_id", "bos_token_id", "chat_template",
    "added_tokens", "add_bos_token", "model_max_length", "moe_gate_act", "compression_ratio", "auto_map",
)  # fmt: skip
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0], "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default"}},
)
_TEMPLATES = (
    "{{", "{% for m in messages %}", "{% if %}", "{{ messages[0].content }}", "{{ undefined.x.y }}",
    "{{ 'a' * 3000000000 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "{{ 9 ** 9 ** 9 }}", "(" * 5000,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ ''.__class__.__mro__ }}", "{{ '%2000000000d' % 1 }}", "{% include 'x' %}", "{{ raise_exception('no') }}",
    "{% set x = namespace(a=[]) %}{% for i in range(30) %}{% set x.a = x.a + x.a + [i] %}{% endfor %}", "\0", "\ufeff",
)  # fmt: skip


def write_mutant(seed: str, folder: Path) -> str:
    """Write one damaged checkpoint into an empty folder and return what was done to it."""
    rng = random.Random(seed)
    if rng.random() < _GGUF_SHARE:
        return gguf_mutations.write_mutant(rng, folder, _TEMPLATES)
    if rng.random() < _QUANTIZED_SHARE:
        return quantized_mutations.write_mutant(rng, folder, mutate_value)
    source = rng.choice([*sorted(p for p in _GOLDEN.iterdir() if p.is_dir()), *[_DEMO] * (rng.random() < 0.2)])
    for path in source.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.suffix != ".npz":
            shutil.copy(path, folder / path.name)
    steps = [rng.choices(list(_MUTATIONS), list(_MUTATIONS.values()))[0] for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return f"{source.name}: " + "; ".join(step(rng, folder) for step in steps)


def _some_folder(rng: random.Random, folder: Path) -> Path:
    """The draft layers have a folder of their own in some checkpoints."""
    return folder / "mtp" if (folder / "mtp").is_dir() and rng.random() < 0.3 else folder


def mutate_json(rng: random.Random, folder: Path) -> str:
    """Change one value somewhere in a JSON file."""
    path = _some_folder(rng, folder) / rng.choices(JSON_FILES, (6, 1, 1, 2))[0]
    try:
        document = read_json(path)
    except CheckpointError:
        return f"{path.name}: left as it is"
    what = mutate_value(rng, document)
    path.write_text(json.dumps(document), errors="surrogatepass")
    return f"{path.name}: {what}"


def mutate_value(rng: random.Random, document: Any) -> str:
    """Change, add or delete one value of a document and return what was done."""
    container, trail = document, ""
    while True:
        keys = list(container) if isinstance(container, dict) else range(min(len(container), 50))
        if isinstance(container, dict) and (not keys or rng.random() < 0.3):
            key: Any = rng.choice(_KEYS)
            container[key] = rng.choice(_ROPES) if key.startswith("rope_p") else _value(rng)
            return f"{trail}.{key} = {_short(container[key])}"
        if not keys:
            container.append(_value(rng))
            return f"{trail} + {_short(container[-1])}"
        key = rng.choice(list(keys))
        trail += f".{key}"
        child = container[key]
        if isinstance(child, dict | list) and rng.random() < 0.7:
            container = child
            continue
        if rng.random() < 0.15:
            del container[key]
            return f"{trail} deleted"
        container[key] = _nudged(rng, child)
        return f"{trail} = {_short(container[key])}"


def _nudged(rng: random.Random, value: Any) -> Any:
    """A neighbour of a number, or any other value."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**300 and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**9, float(value), str(value)))
    return _value(rng)


def _value(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        value: Any = []
        for _ in range(rng.choice((10, 200, 900))):
            value = [value]
        return value
    return rng.choice(_EDGES)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


def mutate_bytes(rng: random.Random, folder: Path) -> str:
    """Cut, overwrite or fill up a file of any format."""
    path = _any_file(rng, folder)
    data = bytearray(path.read_bytes())
    kind = rng.choice(("empty", "cut", "flip", "noise", "doubled", "nested", "bom", "latin"))
    if kind == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif kind == "flip":
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        made = {"empty": b"", "noise": rng.randbytes(2000), "doubled": data * 2, "nested": b"[" * 200_000,
                "bom": b"\xef\xbb\xbf" + data, "latin": data + b"\xe9"}  # fmt: skip
        data = bytearray(made[kind])
    path.write_bytes(data)
    return f"{path.name}: {kind}"


def _make_immense(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


def mutate_kind(rng: random.Random, folder: Path) -> str:
    """Put something in a file's place that is no regular file, or none at all."""
    path = _any_file(rng, folder)
    path.unlink()
    kinds: dict[str, Callable[[], object]] = {
        "gone": lambda: None,
        "a FIFO": lambda: os.mkfifo(path),
        "a directory": path.mkdir,
        "a link to nothing": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a device": lambda: path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/tty"))),
        "immense": lambda: _make_immense(path),
    }
    kind = rng.choice(list(kinds))
    kinds[kind]()
    return f"{path.name}: {kind}"


def _any_file(rng: random.Random, folder: Path) -> Path:
    files = sorted(p for p in _some_folder(rng, folder).iterdir() if p.is_file() and p.stat().st_size < 1 << 30)
    return rng.choice(files) if files else _filler(folder)


def _filler(folder: Path) -> Path:
    path = folder / "README.md"
    path.write_text("nothing else is left")
    return path


def mutate_template(rng: random.Random, folder: Path) -> str:
    """Replace or extend the chat template by something hostile."""
    path, extra = folder / "chat_template.jinja", rng.choice(_TEMPLATES)
    text = path.read_text(errors="replace") if path.is_file() and path.stat().st_size < 1 << 20 else ""
    if os.path.lexists(path) and not path.is_file():
        return "chat_template.jinja: left as it is"
    at = rng.randrange(len(text) + 1)
    path.write_text(rng.choice((extra, text + extra, text[:at] + extra + text[at:])), errors="surrogatepass")
    return f"chat_template.jinja: {extra[:40]!r}"


def mutate_tensors(rng: random.Random, folder: Path) -> str:
    """Change the header of a file of tensors, or overwrite some of its values."""
    path = _some_folder(rng, folder) / _WEIGHTS
    if not path.is_file() or path.stat().st_size > 1 << 30:
        return f"{path.name}: left as it is"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
    try:
        header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    except (ValueError, RecursionError):
        return f"{path.name}: left as it is"
    what = _mutate_header(rng, header) if rng.random() < 0.7 else _overwrite(rng, body)
    text = json.dumps(header).encode(errors="surrogatepass")
    wrong = (0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1)
    claimed = len(text) if rng.random() < 0.9 else rng.choice(wrong)
    path.write_bytes(struct.pack("<Q", claimed) + text + body)
    return f"{path.name}: {what}" + ("" if claimed == len(text) else f", header of {claimed} bytes")


def _mutate_header(rng: random.Random, header: Any) -> str:
    names = [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []
    if not names:
        return "left as it is"
    name = rng.choice(names)
    kind = rng.choice(("field", "field", "drop", "rename", "copy", "swap", "reverse", "metadata"))
    if kind == "field" and isinstance(header[name], dict):
        return f"{name}: {mutate_value(rng, header[name])}"
    if kind == "drop":
        del header[name]
    elif kind == "rename":
        header[name + rng.choice(("x", ".bias", "\0", "." * 3000))] = header.pop(name)
    elif kind == "copy":
        header[rng.choice(("lm_head.bias", "model.layers.0.self_attn.q_proj.bias", name + "2"))] = header[name]
    elif kind == "swap":
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    elif kind == "reverse" and isinstance(header[name], dict) and isinstance(header[name].get("shape"), list):
        header[name]["shape"].reverse()
    else:
        header["__metadata__"] = _value(rng)
    return f"{kind} {name}"


def _overwrite(rng: random.Random, body: bytearray) -> str:
    if not body:
        return "left as it is"
    begin = rng.randrange(len(body)) & ~1
    end = min(begin + rng.choice((2, 200, 10**6)), len(body))
    pattern = rng.choice((b"\xff\xff", b"\x80\x7f", b"\x80\xff", b"\x7f\x7f", b"\x00\x00"))
    body[begin:end] = (pattern * ((end - begin) // 2 + 1))[: end - begin]
    return f"values {begin}..{end} = {pattern.hex()}"


def write_index(rng: random.Random, folder: Path) -> str:
    """Add an index of tensors, right or not."""
    target = rng.choice((_WEIGHTS, "none.safetensors", "../x.safetensors", "", ".", "/etc/passwd", "\0", "config.json"))
    index: Any = {"metadata": {}, "weight_map": {"model.norm.weight": target}}
    what = mutate_value(rng, index) if rng.random() < 0.5 else target
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), errors="surrogatepass")
    return f"index: {what!r}"


_MUTATIONS: dict[Callable[[random.Random, Path], str], int] = {
    mutate_json: 10, mutate_bytes: 3, mutate_kind: 2, mutate_template: 2, mutate_tensors: 5, write_index: 1,
}  # fmt: skip
