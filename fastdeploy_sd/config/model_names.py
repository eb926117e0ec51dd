"""Which `model` is the name of one on a hub, and what to do about one that is neither a name nor a checkpoint here."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_MAX_CHARS = 96  # of a name, as Hugging Face has it


def hub_name(model: str) -> str | None:
    """Return the name, as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B-GGUF:Q8_0`; None = the model is here, or is no name.

    What lies here always wins.
    """
    is_name = len(model) <= _MAX_CHARS and _HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf")
    return model if is_name and not os.path.lexists(model) else None


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder that holds some."""
    if os.path.isfile(path):
        return path.suffix == ".gguf"
    return os.path.isdir(path) and any(path.glob("*.gguf"))


def advice(path: Path) -> str:
    """Return what to do about a model that is none, "" where its kind is not known."""
    return "; that is a file: give the directory it is in" if os.path.isfile(path) else ""
