"""Fetches models of the Hugging Face Hub with the package huggingface_hub, which keeps the cache.

A broken download is resumed within a start; the next start keeps whole files. A complete commit in the cache is used
without asking the hub. For a branch the hub is asked; where it cannot be reached the cache is used, with a warning.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from fastdeploy_sd.errors import ConfigError, shown
from fastdeploy_sd.hub.selection import WantedModel, is_gguf

_log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ASK_TIMEOUT_S = 20.0
_SERVER_ERRORS = 500
_MAX_NAMED = 12
_GB = 1e9


def fetch(wanted: WantedModel) -> Path:
    """Return the folder of a model, after fetching what is missing of it.

    Raises ConfigError: there is no such model or revision, it has no such files, the hub cannot be reached, or
    nothing may be fetched and the cache lacks a file.
    """
    from huggingface_hub import HfApi, constants

    is_offline = wanted.is_offline or constants.HF_HUB_OFFLINE
    if is_offline or _COMMIT.fullmatch(wanted.revision or ""):
        folder = _cached(wanted)
        if folder is not None and not wanted.missing_files(folder):
            return folder
        if is_offline:
            raise ConfigError(
                f"model: {_in_cache(wanted, folder)}, and nothing is fetched now (offline, HF_HUB_OFFLINE, or a command"
                " that loads nothing); start a server once without that, or give a directory",
                param="model",
            )
    try:
        info = HfApi().model_info(wanted.name, revision=wanted.revision, timeout=_ASK_TIMEOUT_S, files_metadata=True)
    except Exception as error:
        return _without_hub(wanted, error)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = wanted.select_files(sizes)
    if not files:
        kind = f"GGUF files of type {wanted.gguf_type}" if wanted.gguf_type else "safetensors or GGUF files"
        others = sorted(filter(is_gguf, sizes))[:_MAX_NAMED]
        raise ConfigError(
            f"model: expected a repository with {kind}, got {wanted.name!r}, which has none (pickled weights are not"
            f" read)" + (f"; it has {', '.join(others)}" if others else ""),
            param="model",
        )
    return _download(wanted, str(info.sha), {name: sizes[name] for name in files})


def _cached(wanted: WantedModel) -> Path | None:
    """Return the cache's folder of the revision, complete or not; None = there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # The pattern matches no file, so that none is missing.
        found = snapshot_download(
            wanted.name,
            revision=wanted.revision,
            cache_dir=wanted.folder,
            local_files_only=True,
            allow_patterns=["//"],
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    return Path(found)


def _without_hub(wanted: WantedModel, error: Exception) -> Path:
    """Return the cache's folder where the hub does not answer; raises ConfigError where it refuses."""
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", _SERVER_ERRORS)
    if status < _SERVER_ERRORS or isinstance(error, ValueError):
        raise _refusal(wanted, error) from error
    folder = _cached(wanted)
    if folder is None or wanted.missing_files(folder):
        raise ConfigError(
            f"model: {constants.ENDPOINT} cannot be reached ({_cause(error)}), and {_in_cache(wanted, folder)}; check"
            " the network, HF_ENDPOINT and the proxy's variables, or give a directory",
            param="model",
        ) from error
    _log.warning("%s cannot be reached (%s): %s is taken from the cache", constants.ENDPOINT, _cause(error), folder)
    return folder


def _download(wanted: WantedModel, commit: str, sizes: dict[str, int]) -> Path:
    """Fetch the files that the cache lacks."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    cache = wanted.folder or Path(constants.HF_HUB_CACHE)
    lacking = [
        name
        for name in sizes
        if not isinstance(try_to_load_from_cache(wanted.name, name, cache_dir=cache, revision=commit), str)
    ]
    num_bytes = sum(sizes[name] for name in lacking)
    if lacking:
        text = "fetching %s at %s: %d files, %.2f GB, into %s"
        _log.info(text, wanted.name, commit, len(lacking), num_bytes / _GB, cache)
    storage = cache / f"models--{wanted.name.replace('/', '--')}"
    try:
        with _without_bars(), FetchProgress(wanted.name, storage, num_bytes):
            found = snapshot_download(
                wanted.name,
                revision=wanted.revision,
                cache_dir=cache,
                allow_patterns=[glob.escape(name) for name in sizes],
            )
    except Exception as error:
        raise ConfigError(
            f"model: fetching {wanted.name!r} into {cache} broke off ({_cause(error)}); start again, whole files are"
            " kept",
            param="model",
        ) from error
    return Path(found)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Switch the package's own progress bars off."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    has_bars = not are_progress_bars_disabled()
    if has_bars:
        disable_progress_bars()
    try:
        yield
    finally:
        if has_bars:
            enable_progress_bars()


def _refusal(wanted: WantedModel, error: Exception) -> ConfigError:
    from huggingface_hub import constants, errors

    name, place = wanted.name, f"{constants.ENDPOINT}/{wanted.name}"
    if isinstance(error, errors.GatedRepoError):
        text = f"model: {name!r} is open to who has accepted its terms: do so at {place}, and set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"model: expected a directory, or the name of a model at {constants.ENDPOINT}, got {name!r}, which is not"
            " there; if it is private, set HF_TOKEN"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"revision: expected a branch, tag or commit of {name}, got {shown(wanted.revision)} (see {place})",
            param="revision",
        )
    else:
        text = f"model: asking {constants.ENDPOINT} for {name!r} failed ({_cause(error)})"
    return ConfigError(text, param="model")


def _in_cache(wanted: WantedModel, folder: Path | None) -> str:
    """Say what the cache has of a model."""
    from huggingface_hub import constants

    cache = wanted.folder or constants.HF_HUB_CACHE
    revision = "" if wanted.revision is None else f" at {wanted.revision}"
    if folder is None:
        return f"{wanted.name!r}{revision} is not in {cache}"
    missing = wanted.missing_files(folder)
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{wanted.name!r}{revision} is in {cache} without {missing[0]}{more}"


def _cause(error: Any) -> str:
    """Return a line about a library's exception."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_POLL_S = 0.5
_LOG_INTERVAL_S = 5.0
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are


class FetchProgress:
    """Shows how a folder of a model grows: a bar on a terminal, elsewhere a log line every few seconds."""

    def __init__(self, name: str, folder: Path, total: int) -> None:
        self._name, self._folder, self._total = name, folder, total
        self._before = _num_bytes(folder)
        # None: no bar unless standard error is a terminal.
        self._bar = tqdm(total=total, desc=f"fetching {name}", unit="B", unit_scale=True, disable=None, leave=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.close()

    def _watch(self) -> None:
        next_line = time.monotonic() + _LOG_INTERVAL_S
        while not self._ended.wait(_POLL_S):
            num_done = min(_num_bytes(self._folder) - self._before, self._total)
            self._bar.update(num_done - self._bar.n)
            if self._bar.disable and time.monotonic() >= next_line:
                _log.info("fetching %s: %.1f of %.1f GB", self._name, num_done / _GB, self._total / _GB)
                next_line = time.monotonic() + _LOG_INTERVAL_S


def _num_bytes(folder: Path) -> int:
    """Return the bytes that were written of the files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except OSError:
                continue  # moved meanwhile
            total += min(found.st_size, found.st_blocks * _BLOCK_BYTES)
    return total
