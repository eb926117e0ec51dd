"""Selects the files of a repository that are a checkpoint: safetensors with configuration and tokenizer, or GGUF files.

Pickled weights, Python code and other formats of the same weights are not fetched. Knows no hub.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_sd.errors import CheckpointError, ConfigError
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
_GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NO_MODELS = ("mmproj", "imatrix")  # GGUF files of image encoders and of a quantiser's statistics
_USUAL_GGUF_TYPE = "Q4_K_M"
_MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class WantedModel:
    """What to find or fetch.

    Attributes:
        name: as `Qwen/Qwen3-0.6B`.
        gguf_type: as `Q4_K_M`; None = safetensors, or the usual GGUF file where there are none.
        revision: branch, tag or commit; None = the default branch.
        folder: the cache; None = the hub's own.
    """

    name: str
    gguf_type: str | None
    revision: str | None
    folder: Path | None
    is_offline: bool

    def select_files(self, names: Iterable[str]) -> list[str]:
        """Return the files of a repository that are the checkpoint; [] = none are.

        Raises ConfigError: several of its GGUF models could be meant.
        """
        names = list(names)
        found = [] if self.gguf_type else [name for name in names if is_of_checkpoint(name)]
        copies = [name for name in found if any(fnmatch.fnmatchcase(name, pattern) for pattern in _COPIES)]
        num_weights = sum(map(is_weights, found))
        if num_weights == 0:
            return self._gguf_files(names)
        return found if len(copies) == num_weights else [name for name in found if name not in copies]

    def _gguf_files(self, names: Sequence[str]) -> list[str]:
        models: dict[str, list[str]] = {}
        for name in names:
            if is_gguf(name) and name.count("/") <= 1 and not name.rpartition("/")[2].startswith(_NO_MODELS):
                models.setdefault(_gguf_stem(name), []).append(name)
        chosen = [stem for stem in models if _is_of_type(stem, self.gguf_type or _USUAL_GGUF_TYPE)]
        if not self.gguf_type and not chosen:
            chosen = list(models)
        if len(chosen) > 1:
            raise ConfigError(
                f"model: expected one GGUF model of type {self.gguf_type or _USUAL_GGUF_TYPE} in {self.name}, found"
                f" {', '.join(sorted(chosen)[:_MAX_NAMED])}; give the type, as {self.name}:Q8_0",
                param="model",
            )
        return [] if not chosen else sorted(models[chosen[0]])

    def missing_files(self, folder: Path) -> Sequence[str]:
        """Return the files that a folder lacks to be the model; raises CheckpointError of a wrong index."""
        ggufs = [name for name in self.files_in(folder) if is_gguf(name)]
        if ggufs or self.gguf_type:
            parts = gguf_parts(ggufs[0]) if ggufs else [f"*{self.gguf_type}.gguf"]
            return [name for name in parts if name not in ggufs]
        return _missing_by_index(folder)

    def files_in(self, folder: Path) -> list[str]:
        """Return the files of the model that lie in a folder."""
        found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
        return self.select_files(found)


def is_weights(name: str) -> bool:
    """Whether a file holds weights in safetensors."""
    return fnmatch.fnmatchcase(name, WEIGHTS)


def is_gguf(name: str) -> bool:
    """Whether a file holds weights in GGUF."""
    return name.endswith(".gguf")


def gguf_parts(name: str) -> list[str]:
    """Return the files of the set that a GGUF file is of, in order."""
    part = _GGUF_PART.fullmatch(name)
    return [name] if part is None else [f"{part[1]}-{i:05}-of-{part[3]}.gguf" for i in range(1, int(part[3]) + 1)]


def _gguf_stem(name: str) -> str:
    part = _GGUF_PART.fullmatch(name)
    return name.removesuffix(".gguf") if part is None else part[1]


def _is_of_type(stem: str, gguf_type: str) -> bool:
    """UD: files that mix types ("dynamic"), of which publishers have one besides the usual one."""
    return re.search(rf"(?<![-._]UD)[-._/]{re.escape(gguf_type)}$", stem, re.IGNORECASE) is not None


def is_of_checkpoint(name: str) -> bool:
    """Whether a file of a repository belongs to a checkpoint in the layout of Hugging Face."""
    folder, _, base = name.rpartition("/")
    return folder in _FOLDERS and any(fnmatch.fnmatchcase(base, pattern) for pattern in NAMES)


def _missing_by_index(folder: Path) -> Sequence[str]:
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
