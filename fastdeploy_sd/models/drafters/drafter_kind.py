"""Which kind of drafter a folder holds: config.json says so first, names of tensors second. Needs no Paddle.

A kind is called as the method that runs it, where there is one and it runs no other: see types.draft_methods.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError, ConfigError, shown
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.weights.source import ModelSource

_PARAM = "speculative_config"
DRAFT_MODEL, MTP, P_EAGLE = "draft_model", "mtp", "p_eagle"
# What a kind is, for errors.
KINDS: Mapping[str, str] = {
    DRAFT_MODEL: "a whole model",
    MTP: "multi-token prediction (MTP) layers",
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "eagle3": "an EAGLE-3 head",
    P_EAGLE: "a P-EAGLE head",
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    "mlp_speculator": "an MLP speculator",
    "arctic_lstm": "an Arctic LSTM speculator",
    "dflash": "a DFlash block drafter",
    "dspark": "a DSpark block drafter",
    "domino": "a Domino block drafter",
    "dflash2": "a DFlash2 block drafter",
}
# Kinds that a method of another name runs.
_METHODS = {P_EAGLE: "eagle3"}
_CONTAINER = "speculators_model_type"
_OF_CONTAINER = {"peagle": "p_eagle", **{kind: kind for kind in ("eagle", "eagle3", "dflash", "dspark", "mtp")}}
# The first pattern that a name of config.json's `architectures` has decides.
_OF_ARCHITECTURE = (
    ("p_eagle", re.compile("p_?eagle", re.IGNORECASE)),
    ("eagle3", re.compile("eagle_?3", re.IGNORECASE)),
    ("eagle", re.compile("eagle", re.IGNORECASE)),
    ("medusa", re.compile("medusa", re.IGNORECASE)),
    ("hydra", re.compile("hydra", re.IGNORECASE)),
    ("mlp_speculator", re.compile("MLPSpeculator")),
    ("dflash", re.compile("DFlash")),
)
_OF_MODEL_TYPE = {kind: kind for kind in ("eagle", "eagle3", "medusa", "hydra", "mlp_speculator")}
# The first pattern that a tensor's name fits decides: a kind's tensors are among those of the kinds before it.
_OF_TENSOR = (
    ("dspark", re.compile(r"markov_head\..*")),
    ("domino", re.compile(r"prefix_gru\..*")),
    ("dflash2", re.compile(r"candidate_selector\..*|layers\.\d+\.(attention|mlp)_conv\..*")),
    ("p_eagle", re.compile(r"mask_hidden")),
    ("eagle3", re.compile(r"midlayer\..*|layers\.0\.hidden_norm\.weight")),
    ("arctic_lstm", re.compile(r"forget_emb\.0\.weight")),
    ("mlp_speculator", re.compile(r"emb\.0\.weight")),
    ("hydra", re.compile(r"hydra_(mlp|lm_head)\..*|prefix_embeding_layer\..*")),
    ("medusa", re.compile(r"medusa_heads?\..*|blocks\.0\.layers\.0\.weight|\d+\.\d+\.linear\.weight")),
    ("mtp", re.compile(r"(mtp_.*|mtp\..*|layers\.\d+\.(eh_proj|enorm))\..*")),
    ("dflash", re.compile(r"hidden_norm\.weight")),
    ("eagle", re.compile(r"(fusion_)?fc\.weight")),
)
_PREFIX = re.compile(r"(model|ernie|speculator)\.")
# What config.json may say of a kind that only its tensors, or a further key, tell apart.
_COARSER = {
    "p_eagle": ("eagle3",),
    "arctic_lstm": ("mlp_speculator",),
    **dict.fromkeys(("dspark", "domino", "dflash2"), ("dflash",)),
}

# Kinds whose tensors a whole model may have in the same files.
_IN_WHOLE_MODELS = (MTP,)


def open_drafter(place: str | None, method: str) -> Checkpoint:
    """Open the folder of a drafter of a method.

    Raises ConfigError: there is no folder, or it holds another kind; CheckpointError: it cannot be read.
    """
    if place is None or not Path(place).is_dir():
        got = "nothing" if place is None else repr(place)
        text = f"expected the folder of {KINDS[method]} for method {method}, got {got}"
        raise ConfigError(f"{_PARAM}.model: {text}", param=_PARAM)
    checkpoint = Checkpoint(Path(place))
    kind = drafter_kind(checkpoint)
    if method_of(kind) != method:
        text = f"expected {KINDS[method]} for method {method}, got {KINDS[kind]} ({kind}) in {place}"
        raise ConfigError(f"{_PARAM}.model: {text}", param=_PARAM)
    return checkpoint


def method_of(kind: str) -> str:
    """Return the name of the method that runs a kind, where there is one."""
    return _METHODS.get(kind, kind)


def drafter_kind(source: ModelSource) -> str:
    """Return the kind of a drafter, one of KINDS.

    Raises CheckpointError: config.json names an unknown kind, or another than the tensors do.
    """
    said, found = _said_by(source.config, str(source.config_path)), _found_among(source.names())
    if said is None:
        return found or DRAFT_MODEL
    if found is None or found == said or found in _COARSER.get(said, ()):
        return said
    if said in _COARSER.get(found, ()):
        return found
    raise CheckpointError(
        f"{source.path}: expected the tensors of {KINDS[said]}, which {source.config_path.name} says it is, got those"
        f" of {KINDS[found]}"
    )


def _said_by(config: Mapping[str, Any], where: str) -> str | None:
    """Return the kind that config.json names; None = it reads like that of a whole model."""
    container = config.get(_CONTAINER)
    if container is not None:
        if container not in _OF_CONTAINER:
            raise CheckpointError(
                f"{where}: {_CONTAINER}: expected one of {', '.join(_OF_CONTAINER)}, got {shown(container)}"
            )
        return _OF_CONTAINER[container]
    kind, dflash = next(_kinds_of(config), None), config.get("dflash_config")
    finer = [str(dflash.get("projector_type"))] if isinstance(dflash, Mapping) else []
    finer += ["arctic_lstm"] * ("proj_dim" in config or "input_hidden_dim" in config)
    return next((name for name in finer if name in _COARSER and kind in _COARSER[name]), kind)


def _kinds_of(config: Mapping[str, Any]) -> Iterator[str]:
    names = config.get("architectures")
    for name in names if isinstance(names, Sequence) else ():
        yield from (kind for kind, pattern in _OF_ARCHITECTURE if isinstance(name, str) and pattern.search(name))
    if "dflash_config" in config:
        yield "dflash"
    if config.get("model_type") in _OF_MODEL_TYPE:
        yield _OF_MODEL_TYPE[config["model_type"]]
    if config.get("draft_vocab_size") is not None:
        yield "eagle3"
    yield from (kind for kind in ("medusa", "hydra") if f"{kind}_num_heads" in config)


def _found_among(tensors: Sequence[str]) -> str | None:
    """Return the kind that names of tensors tell; None = they read like those of a whole model."""
    names = [_PREFIX.sub("", name, count=1) for name in tensors]
    found = next((kind for kind, pattern in _OF_TENSOR if any(map(pattern.fullmatch, names))), None)
    is_whole = "embed_tokens.weight" in names and "layers.0.input_layernorm.weight" in names
    return None if is_whole and found in _IN_WHOLE_MODELS else found
