"""The columns of the matrix: how drafts are made, and what single requests ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.spec_decode.proposer import MakeProposer
from fastdeploy_sd.types import Request, Speculation
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE

_MIXED = "mixed"
# Name of the column -> the method, and the strategy by which another one extends its drafts.
_HYBRIDS = {f"{m.name}-{rest}": (m, strategy) for m in METHODS.values() for strategy, rest in m.extensions.items()}
_MODEL_FREE = [m.name for m in METHODS.values() if not m.needs_model and not m.chooses]
# Name of the column -> the method that chooses, and the method with a model that is among its sources.
_WITH_LAYERS = {
    f"{m.name}-{layers.name}": (m, layers)
    for m in METHODS.values()
    if m.chooses
    for layers in METHODS.values()
    if layers.auto_key
}
METHOD_NAMES = (*METHODS, *_HYBRIDS, *_WITH_LAYERS, _MIXED)
_MIN_HYBRID_TOKENS = 2
_MODEL_STEPS = 3
# Drafts from the shortest matches: there are more of them, and wrong drafts test as much as right ones.
_MANY_DRAFTS = SpeculativeConfig(
    min_ngram_size=1,
    max_ngram_size=3,
    ngram_max_spec_factor=8.0,
    suffix_decoding_max_spec_factor=8.0,
    suffix_decoding_min_token_prob=0.0,
)


@dataclass(frozen=True, slots=True)
class Method:
    """One way of drafting: request i asks for speculations[i % n]; with () no request asks for anything."""

    name: str
    speculative: SpeculativeConfig
    make_proposer: MakeProposer = create_proposer
    speculations: tuple[Speculation, ...] = ()

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts per request and step at most."""
        return self.speculative.num_speculative_tokens

    @property
    def is_drafting(self) -> bool:
        """Whether it may draft at all."""
        return self.num_speculative_tokens > 0

    def apply(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with what the method has them ask for."""
        if not self.speculations:
            return list(requests)
        return [replace(r, speculation=self.speculations[i % len(self.speculations)]) for i, r in enumerate(requests)]


PLAIN = Method(NAIVE, SpeculativeConfig())


def standard_methods(
    names: Sequence[str],
    num_speculative_tokens: Sequence[int],
    weights: SpeculativeConfig | None = None,
    model_method: str | None = None,
) -> list[Method]:
    """Return the columns for some of METHOD_NAMES.

    Args:
        names: "mixed" lets the requests of one batch choose among methods and lengths. It has one column, of the
            largest number, which is also the steps of a model there: the checkpoint must have layers for it.
        num_speculative_tokens: every method that drafts gets a column for each; a hybrid, which needs two drafts, for
            those of at least 2.
        weights: says where those of draft layers are and in which formats they and their head are; None = the defaults.
        model_method: the one with a model that "mixed" has among its methods; None = that of the names, if any.

    Raises ConfigError: an unknown name, or a number below 1.
    """
    for name in names:
        if name not in METHOD_NAMES:
            known = ", ".join(METHOD_NAMES)
            raise ConfigError(f"methods: expected some of {known}, got {name!r}{suggest(name, METHOD_NAMES)}")
    if min(num_speculative_tokens, default=1) < 1:
        raise ConfigError(f"num_speculative_tokens: expected at least 1, got {min(num_speculative_tokens)}")
    weights = weights or SpeculativeConfig()
    base = replace(
        _MANY_DRAFTS,
        model=weights.model,
        quantization=weights.quantization,
        draft_head_quantization=weights.draft_head_quantization,
    )
    methods = []
    for name in dict.fromkeys(names):
        if name == NAIVE:
            methods.append(PLAIN)
        elif name == _MIXED:
            methods.append(_mixed(max(num_speculative_tokens), base, model_method or _model_method(names)))
        else:
            methods += [_column(name, k, base) for k in num_speculative_tokens if _has_room(name, k)]
    return methods


def _has_room(name: str, k: int) -> bool:
    return name not in _HYBRIDS or k >= _MIN_HYBRID_TOKENS


def _column(name: str, k: int, base: SpeculativeConfig) -> Method:
    values: dict[str, Any] = {"method": name, "num_speculative_tokens": k}
    if name in _WITH_LAYERS:
        method, layers = _WITH_LAYERS[name]
        values |= {"method": method.name, layers.auto_key: True, "num_model_steps": min(k, _MODEL_STEPS)}
        if layers.has_own_folder:
            values["draft_method"] = layers.name
    elif name in _HYBRIDS:
        hybrid, strategy = _HYBRIDS[name]
        values |= {"method": hybrid.name, "mtp_strategy": strategy, "num_model_steps": k // 2}
    elif METHODS[name].needs_model:
        values["num_model_steps"] = k
    return Method(f"{name} k={k}", replace(base, **values))


def _model_method(names: Sequence[str]) -> str | None:
    """The first method with a model that a name stands for."""
    methods = [_HYBRIDS[name][0] if name in _HYBRIDS else METHODS.get(name) for name in names]
    return next((method.name for method in methods if method is not None and method.needs_model), None)


def _mixed(k: int, base: SpeculativeConfig, model_method: str | None) -> Method:
    """Requests that take what the server does, name a method that needs no model, half of these with k 1, or none."""
    drafting = enumerate(name for name in _MODEL_FREE if name != NAIVE)
    named = [Speculation(method=name, num_speculative_tokens=(None, 1)[i % 2]) for i, name in drafting]
    speculations = (Speculation(), *named, Speculation(enabled=False), Speculation(method=NAIVE))
    return replace(_column(model_method or _MODEL_FREE[-1], k, base), name=f"{_MIXED} k={k}", speculations=speculations)
