"""The values that all nodes of a group must share, and the keys of the sockets between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path

import fastdeploy_sd
from fastdeploy_sd.config import Config, to_json
from fastdeploy_sd.config.catalogue import OPTIONS
from fastdeploy_sd.device import library
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.wire.secret import deployment_secret, derive_key
from fastdeploy_sd.wire.sockets import CurveKeys
from fastdeploy_sd.worker.loading.weights_digest import weights_digest

# Options that may differ between nodes: places of files, and what only the first node reads or sets.
_OWN_OPTIONS = frozenset({
    "download_dir", "local_data_parallel_id", "model", "max_num_queued_requests", "max_num_queued_tokens",
    "model_source", "node_rank", "offline", "packed_weights_cache", "revision", "scheduling_policy", "seed",
    "served_model_name", "swap_folder", "timeout_nodes", "tokenizer", "tokenizer_backend",
})  # fmt: skip
_OWN_DRAFTING = frozenset({"model", "suffix_decoding_cache_file"})
_SECTIONS = ("model", "cache", "scheduler", "parallel")


def describe(config: Config) -> dict[str, str]:
    """Return the values that all nodes must share, name -> text; raises CheckpointError for a bad checkpoint."""
    names = [opt.name for opt in OPTIONS if opt.section in _SECTIONS and opt.name not in _OWN_OPTIONS]
    options = loads(to_json(config))["options"]
    alike = {name: dumps(options[name]) for name in names}
    drafting = {
        f"speculative_config.{name}": dumps(value, default=str)
        for name, value in asdict(config.speculative).items()
        if name not in _OWN_DRAFTING
    }
    draft_path = Path(config.speculative.model or config.model.path / "mtp")
    has_draft = bool(config.speculative.draft_models) and draft_path.is_dir()
    return {
        "version": fastdeploy_sd.__version__,
        "instruction-set level": library.isa(),
        **alike,
        **drafting,
        "content of model": _digest(config, config.model.path),
        "content of speculative_config.model": _digest(config, draft_path) if has_draft else "",
    }


def mismatch(own: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return why another node cannot join this one: the name, expected, got; None when it can."""
    for name in [*own, *theirs]:
        expected, got = own.get(name, "nothing"), theirs.get(name, "nothing")
        if expected != got:
            return f"{name}: expected {expected} as on node 0, got {got}"
    return None


def node_keys(config: Config) -> CurveKeys:
    """Return the keys of the sockets between nodes; raises ConfigError where there is no secret."""
    secret = deployment_secret(config.splitwise)
    return CurveKeys.of(derive_key(secret, "nodes server"), derive_key(secret, "nodes client"))


def _digest(config: Config, path: Path) -> str:
    checkpoint = Checkpoint(path)
    return f"{checkpoint.config_digest()} {weights_digest(config, checkpoint)}"
