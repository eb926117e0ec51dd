"""Fetches models of ModelScope with the package modelscope, an optional dependency, which keeps the cache."""

from __future__ import annotations

import logging
from pathlib import Path

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub.selection import NAMES, WantedModel

_log = logging.getLogger(__name__)


def fetch(wanted: WantedModel) -> Path:
    """Return the folder of a model, after fetching what is missing of it; subfolders are left out.

    Raises ConfigError: the package is not installed, there is no such model or revision, ModelScope cannot be reached,
    or nothing may be fetched and the cache lacks a file.
    """
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model_source: expected huggingface, as the package modelscope is not installed ({error}; `pip install"
            " modelscope`), got modelscope",
            param="model_source",
        ) from error
    if not wanted.is_offline:
        _log.info("fetching %s of ModelScope, unless it is in the cache", wanted.name)
    kind = wanted.gguf_type
    try:
        found = snapshot_download(
            wanted.name,
            revision=wanted.revision,
            cache_dir=None if wanted.folder is None else str(wanted.folder),
            local_files_only=wanted.is_offline,
            allow_patterns=list(NAMES) if kind is None else [f"*{name}.gguf" for name in (kind, kind.lower())],
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        raise _refusal(wanted, error) from error
    folder = Path(found)
    if wanted.is_offline and (missing := wanted.missing_files(folder)):
        raise _refusal(wanted, FileNotFoundError(f"{folder} lacks {missing[0]}"))
    return folder


def _refusal(wanted: WantedModel, error: Exception) -> ConfigError:
    cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    revision = "" if wanted.revision is None else f" at {wanted.revision}"
    if wanted.is_offline:
        text = (
            f"is not in the cache, or not all of it, and nothing is fetched now ({cause}); start once without offline"
        )
    else:
        text = f"could not be fetched from ModelScope ({cause}); check name, revision and network"
    return ConfigError(f"model: {wanted.name!r}{revision} {text}, or give a directory", param="model")
