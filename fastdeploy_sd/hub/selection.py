"""Selects the files of a repository that are a checkpoint: weights in safetensors, configuration, tokenizer.

Pickled weights, Python code and other formats of the same weights are not fetched. Knows no hub.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.process.files import read_json

WEIGHTS = "*.safetensors"
INDEX = "*.safetensors.index.json"
# The same weights under other names, which some publishers add.
_COPIES = ("consolidated*.safetensors",)
NAMES = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    INDEX,
    WEIGHTS,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_FOLDERS = ("", "mtp")  # the second one may hold MTP layers


@dataclass(frozen=True, slots=True)
class WantedModel:
    """What to find or fetch.

    Attributes:
        name: as `Qwen/Qwen3-0.6B`.
        revision: branch, tag or commit; None = the default branch.
        folder: the cache; None = the hub's own.
    """

    name: str
    revision: str | None
    folder: Path | None
    is_offline: bool


def select_files(names: Iterable[str]) -> list[str]:
    """Return the files of a repository that are the checkpoint, in their order."""
    found = [name for name in names if _is_wanted(name)]
    copies = [name for name in found if any(fnmatch.fnmatchcase(name, pattern) for pattern in _COPIES)]
    is_only_form = len(copies) == sum(map(is_weights, found))
    return found if is_only_form else [name for name in found if name not in copies]


def is_weights(name: str) -> bool:
    """Whether a file holds weights."""
    return fnmatch.fnmatchcase(name, WEIGHTS)


def _is_wanted(name: str) -> bool:
    folder, _, base = name.rpartition("/")
    return folder in _FOLDERS and any(fnmatch.fnmatchcase(base, pattern) for pattern in NAMES)


def missing_files(folder: Path) -> Sequence[str]:
    """Return the files that a folder lacks to be a checkpoint, by its index; raises CheckpointError of a wrong one."""
    missing = [] if os.path.isfile(folder / "config.json") else ["config.json"]
    indices = sorted(folder.glob(INDEX))
    if not indices:
        return missing if any(folder.glob(WEIGHTS)) else [*missing, WEIGHTS]
    for index in indices:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map: expected an object of file names, got something else")
        missing += [name for name in sorted({*weight_map.values()}) if not os.path.isfile(folder / name)]
    return missing
