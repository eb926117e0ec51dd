"""Turns a model in GGUF files into a folder that is read like any checkpoint.

The folder holds links to the files, and what their metadata say as the JSON files of Hugging Face.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.hub.selection import gguf_parts, is_gguf
from fastdeploy_sd.models.gguf.config import config_json, generation_config
from fastdeploy_sd.models.gguf.container import GgufFile
from fastdeploy_sd.models.gguf.tokenizer import Vocabulary, tokenizer_config, tokenizer_json
from fastdeploy_sd.process.files import describe, replacing
from fastdeploy_sd.types.folders import cache_folder

# Raised whenever the same file would be written as other JSON.
_VERSION = 2


def gguf_files(model: Path) -> list[Path]:
    """Return the GGUF files of a model, in order: of a file, of the set that it begins, or of a folder with one.

    Raises:
        ConfigError: a folder with several models, or a set that is not whole.
    """
    if model.is_dir():
        if any(model.glob("*.safetensors")):
            return []
        found = sorted(model.glob("*.gguf"))
        firsts = [path for path in found if gguf_parts(path.name)[0] == path.name]
        if len(firsts) > 1:
            names = ", ".join(path.name for path in firsts[:5])
            raise ConfigError(f"model: expected one model in {model}, got {names}: give the file", param="model")
        return gguf_files(firsts[0]) if firsts else []
    if not is_gguf(model.name):
        return []
    paths = [model.with_name(name) for name in gguf_parts(model.name)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"model: expected all files of {model.name}, found no {', '.join(missing[:3])}", param="model"
        )
    return paths


def checkpoint_folder(paths: list[Path]) -> Path:
    """Return the folder of a model in these files; it is in the user's cache, and made once for each state of them.

    Raises:
        CheckpointError: a file is not valid, or holds a model that is not served.
        ConfigError: the cache cannot be written.
    """
    first = GgufFile(paths[0])
    parts = [[str(path.resolve()), *_state(path)] for path in paths]
    digest = hashlib.blake2b(json.dumps([_VERSION, parts]).encode(), digest_size=12).hexdigest()
    folder = cache_folder() / "gguf" / digest
    if (folder / "config.json").is_file():
        return folder
    files = _contents(first)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            link = folder / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
        for name, text in files.items():
            with replacing(folder / name) as file:
                file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"model: expected to write {folder}: {describe(error)}", param="model") from None
    return folder


def _contents(file: GgufFile) -> dict[str, str]:
    """Return the files of the folder by name; config.json, which says that all are there, is the last."""
    vocabulary = Vocabulary.read(str(file.path), file.metadata)
    files = {
        "tokenizer.json": json.dumps(tokenizer_json(vocabulary), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(tokenizer_config(vocabulary), ensure_ascii=False),
        "generation_config.json": json.dumps(generation_config(vocabulary)),
    }
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise CheckpointError(f"{file.path}: tokenizer.chat_template: expected a text, got another type")
        files["chat_template.jinja"] = template
    return files | {"config.json": json.dumps(config_json(file), indent=2)}


def _state(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
