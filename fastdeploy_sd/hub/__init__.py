"""Finds models by name in a hub's cache on this machine, or fetches them. Loads and executes nothing.

The first process of a start calls `located` and gives the folder to all others, so a machine fetches a model once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fastdeploy_sd.config import Config, demo_drafter, hub_name
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.hub import huggingface, modelscope
from fastdeploy_sd.hub.gguf import checkpoint_folder, gguf_files
from fastdeploy_sd.hub.selection import WantedModel, is_gguf
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.drafters.drafter_kind import KINDS, drafter_kind, method_of
from fastdeploy_sd.types.draft_methods import FOLDER_METHODS, METHODS

_SOURCES: Mapping[str, Callable[[WantedModel], Path]] = {
    "huggingface": huggingface.fetch,
    "modelscope": modelscope.fetch,
}
_DEFAULT_BRANCHES = (None, "master")  # the second is FastDeploy's default, whatever a hub calls its branch


def located(config: Config, *, may_fetch: bool = True) -> Config:
    """Return the configuration with the folders of its model and its draft model; a folder stays as it is.

    Where `auto` draws from a drafter, it is told which kind of it lies there.

    Raises:
        ConfigError: a model cannot be found or fetched, or no method runs the drafter; the text says what to do.
        CheckpointError: the index of its weights is not valid, or the drafter cannot be read.
    """
    model, draft = config.model, config.speculative.model
    place = hub_name(model.model) or str(model.path)
    folder = _folder(config, place, "model", model.revision, may_fetch=may_fetch)
    if folder is not None:
        config = _with_folder(config, folder, hub_name(model.model) or model.model)
    if draft is not None and any(METHODS[name].has_own_folder for name in config.speculative.draft_models):
        folder = demo_drafter(draft) or _folder(config, draft, "speculative_config.model", None, may_fetch=may_fetch)
        if folder is not None:
            config = replace(config, speculative=replace(config.speculative, model=str(folder)))
        config = _with_draft_method(config)
    return config


def _with_draft_method(config: Config) -> Config:
    """Return the configuration with the method of its drafter, where a method that chooses draws from one."""
    speculative = config.speculative
    folder = Path(speculative.model or "")
    if not speculative.auto_with_draft_model or speculative.draft_method is not None or not folder.is_dir():
        return config
    kind = drafter_kind(Checkpoint(folder))
    if method_of(kind) not in FOLDER_METHODS:
        raise ConfigError(
            f"speculative_config.model: expected a drafter of {' or '.join(FOLDER_METHODS)}, got {KINDS[kind]}",
            param="speculative_config",
        )
    return replace(config, speculative=replace(speculative, draft_method=method_of(kind)))


def _folder(config: Config, place: str, key: str, revision: str | None, *, may_fetch: bool) -> Path | None:
    """Return the folder of a model in a hub or a GGUF file; None = `place` is one. `key`: names it in errors."""
    model, name = config.model, hub_name(place)
    if name is None:
        files = gguf_files(Path(place))
        return checkpoint_folder(files) if files else None
    revision = None if revision in _DEFAULT_BRANCHES else revision
    kept_in = None if model.download_dir is None else Path(model.download_dir).expanduser().absolute()
    repository, _, gguf_type = name.partition(":")
    wanted = WantedModel(repository, gguf_type or None, revision, kept_in, model.offline or not may_fetch)
    folder = _SOURCES[model.model_source](wanted)
    missing = wanted.missing_files(folder)
    if missing:
        raise ConfigError(
            f"{key}: expected a repository with all files of a checkpoint, got {name!r} without"
            f" {', '.join(missing[:3])}",
            param=key.split(".", maxsplit=1)[0],
        )
    ggufs = [folder / file for file in wanted.files_in(folder) if is_gguf(file)]
    return checkpoint_folder(ggufs) if ggufs else folder


def _with_folder(config: Config, folder: Path, name: str) -> Config:
    """Return the configuration with a folder in place of its model, which goes on to be served by its name."""
    origins = {**config.origins, "model": f"{name}, {config.origins.get('model', 'given')}"}
    names = config.model.served_model_name
    if names is None:
        names, origins["served_model_name"] = (name,), "model"
    return replace(config, model=replace(config.model, model=str(folder), served_model_name=names), origins=origins)
