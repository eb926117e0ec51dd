"""Where each key of `speculative_config` has a meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_sd.config.speculative import SpeculativeConfig
from fastdeploy_sd.types.draft_methods import FOLDER_AUTO_KEY, METHODS, NAIVE, methods_reading


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a key has a meaning; elsewhere only its default is accepted.

    Attributes:
        where: for error texts and the documentation.
        holds: whether a configuration is inside.
        subject: the key whose value decides, for error texts.
    """

    where: str
    holds: Callable[[SpeculativeConfig], bool]
    subject: str = "method"


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


_ANY = Scope("any method", lambda c: True)
_DRAFTING = Scope(f"method {_either([name for name in METHODS if name != NAIVE])}", lambda c: c.method != NAIVE)
_CHOOSING = Scope(
    f"method {_either([m.name for m in METHODS.values() if m.chooses])}",
    lambda c: c.method in METHODS and METHODS[c.method].chooses,
)
_TOPP = Scope("verify_strategy topp", lambda c: c.verify_strategy == "topp", "verify_strategy")

# Of the keys that belong to no method.
_SCOPES: Mapping[str, Scope] = {
    "method": _ANY,
    "num_speculative_tokens": _ANY,
    **{method.auto_key: _CHOOSING for method in METHODS.values() if method.auto_key},
    "draft_method": Scope(FOLDER_AUTO_KEY, lambda c: c.auto_with_draft_model, FOLDER_AUTO_KEY),
    "draft_top_k": Scope(
        "draft_trees and a model whose drafts nothing extends",
        lambda c: c.draft_trees and c.extended_by is None and bool(c.draft_models),
        "draft_trees",
    ),
    "verify_strategy": _DRAFTING,
    "accept_policy": _DRAFTING,
    "benchmark_mode": _DRAFTING,
    "max_candidate_len": _TOPP,
    "verify_window": _TOPP,
}


# Options of draft layers, for any method that they draft for.
_OF_LAYERS = (
    "num_model_steps", "model", "quantization", "draft_head_quantization", "draft_tensor_parallel_size",
    "translate_tokens",
)  # fmt: skip


def scope_of(key: str) -> Scope:
    """Return where a key of SPECULATIVE_KEYS has a meaning.

    Those of a method without a model have one wherever anything drafts, as a request may choose it there.
    """
    readers = methods_reading(key)
    if not readers:
        return _SCOPES[key]
    if not all(method.needs_model for method in readers):
        return _DRAFTING
    names = [method.name for method in readers]
    if key in _OF_LAYERS:
        choosing = [method.name for method in METHODS.values() if method.chooses]
        keys = _either(list(dict.fromkeys(method.auto_key for method in readers)))
        where = f"method {_either(names)}, or {_either(choosing)} with {keys}"
        return Scope(where, lambda c: not set(names).isdisjoint(c.draft_models))
    return Scope(f"method {_either(names)}", lambda c: c.method in names)
