"""Damages GGUF files: the values of their metadata, and the numbers that describe their layout."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models import gguf_files

_MODELS = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
_TYPES = ("F32", "Q8_0", "Q4_0", "Q5_1", "Q5_0")
_NUMBERS = (0, 1, 2, 3, 7, 8, 31, 255, 256, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)
_VALUES: tuple[tuple[Any, gguf.GGUFValueType], ...] = (
    *((number % (1 << 32), gguf.GGUFValueType.UINT32) for number in _NUMBERS),
    *((number, gguf.GGUFValueType.UINT64) for number in _NUMBERS),
    (-1, gguf.GGUFValueType.INT32), (-(1 << 63), gguf.GGUFValueType.INT64), (True, gguf.GGUFValueType.BOOL),
    *((number, gguf.GGUFValueType.FLOAT32) for number in (0.0, -1.0, 1e-40, 1e38, float("nan"), float("inf"))),
    *((text, gguf.GGUFValueType.STRING) for text in ("", "x" * 100_000, "\0", "llama", "gpt2", "../../etc/passwd")),
    *((values, gguf.GGUFValueType.ARRAY) for values in ([0], [1] * 5000, ["a"] * 5000, [1.5], [True, False])),
)  # fmt: skip


def write_mutant(rng: random.Random, folder: Path, templates: tuple[str, ...]) -> str:
    """Write one damaged file into an empty folder and return what was done to it."""
    model, path = rng.choice(_MODELS), folder / "model.gguf"
    done: list[str] = []

    def change(writer: gguf.GGUFWriter) -> None:
        if rng.random() < 0.6:
            done.append(_change_metadata(rng, writer, templates))

    gguf_files.write(path, model, rng.choice(_TYPES), change)
    if not done:
        done.append(_overwrite(rng, path))
    return f"{model}.gguf: " + "; ".join(done)


def _change_metadata(rng: random.Random, writer: gguf.GGUFWriter, templates: tuple[str, ...]) -> str:
    values = writer.kv_data[0]
    key = rng.choice([*values, "tokenizer.chat_template", "general.alignment", "split.count", "llama.expert_count"])
    old = values.get(key)
    kind = rng.random()
    if kind < 0.1 and old is not None:
        del values[key]
        return f"{key} deleted"
    if kind < 0.3 and old is not None and isinstance(old.value, list):
        items = [*old.value]
        items[rng.randrange(len(items))] = items[0]
        values[key] = gguf.GGUFValue(items[: rng.choice((1, len(items) - 1, len(items)))], old.type)
        return f"{key}: {len(values[key].value)} of {len(items)} values"
    value, value_type = (rng.choice(templates), gguf.GGUFValueType.STRING) if "template" in key else rng.choice(_VALUES)
    values[key] = gguf.GGUFValue(value, value_type)
    return f"{key} = {str(value)[:40]!r} as {value_type.name}"


def _overwrite(rng: random.Random, path: Path) -> str:
    """Overwrite a count, a length, a type, an offset, a name or the values of a tensor; or cut the file."""
    data = path.read_bytes()
    places = _places(path)
    what, begin, size = rng.choice(places)
    if rng.random() < 0.1:
        path.write_bytes(data[:begin])
        return f"cut before {what}"
    number = rng.choice((*_NUMBERS, rng.getrandbits(64)))
    new = (struct.pack("<Q", number) * (size // 8 + 1))[:size]
    path.write_bytes(data[:begin] + new + data[begin + size :])
    return f"{what} = {number:#x}"


def _places(path: Path) -> list[tuple[str, int, int]]:
    """Return what may be overwritten, and where: (name, first byte, bytes)."""
    reader = gguf.GGUFReader(path)
    start = reader.data.ctypes.data

    def span(part: Any) -> tuple[int, int]:
        return np.asarray(part).ctypes.data - start, min(part.nbytes, 64)

    places = [("magic", 0, 4), ("version", 4, 4), ("count of tensors", 8, 8), ("count of values", 16, 8)]
    for name, stored in reader.fields.items():
        if not name.startswith("GGUF."):
            places += [(f"{name}[{i}]", *span(part)) for i, part in enumerate(stored.parts[:8])]
    for tensor in reader.tensors:
        places += [(f"{tensor.name}[{i}]", *span(part)) for i, part in enumerate(tensor.field.parts)]
        places.append((f"values of {tensor.name}", *span(tensor.data)))
    return places
