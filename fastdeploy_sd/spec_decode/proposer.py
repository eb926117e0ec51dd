"""The interface of drafting methods and the registry that makes one. Knows no method, scheduler or verification."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from fastdeploy_sd.errors import ConfigError, suggest
from fastdeploy_sd.types import I32, DraftTokens, RequestId, VerifyResult

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class ProposerNeeds:
    """What a method wants from the worker.

    Attributes:
        hidden_states: `ProposeInput.hidden` must be filled.
        num_kv_layers: KV layers of its own; they are further layers in every block, under the request's block table.
        probs: it returns `DraftTokens.probs`.
    """

    hidden_states: bool = False
    num_kv_layers: int = 0
    probs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ProposeInput:
    """What any method may look at, after a step was verified. Row r is request_ids[r] everywhere.

    Attributes:
        token_ids: per row a view i32[n] of its committed tokens: prompt, earlier output, and this step's output last.
        max_draft_len: i32[R], the longest draft allowed; 0 for a row whose prompt is unfinished or that failed.
        verified: this step's outcome, accepted drafts counted.
        hidden: the target's hidden rows in the worker's own form, if `needs.hidden_states`; else None.
    """

    request_ids: tuple[RequestId, ...]
    token_ids: Sequence[I32]
    max_draft_len: I32
    verified: VerifyResult
    hidden: object | None = None


class Proposer(Protocol):
    """A drafting method. State, if any, is keyed by request id."""

    @property
    def needs(self) -> ProposerNeeds:
        """Constant over the method's life."""
        ...

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Guess what follows each row's committed tokens.

        Returns:
            At most `max_draft_len[r]` drafts in row r. Fewer or none is always right: a method that does not know
            must not pad. The same input gives the same drafts.
        """
        ...

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Drop the state of requests that ended or were preempted; unknown ids are ignored."""
        ...


# Method -> (module, class); the class takes the SpeculativeConfig. Imported on first use, as a method may bring in
# Paddle or a native library that a server without it must not need.
_METHODS: dict[str, tuple[str, str]] = {
    "naive": ("fastdeploy_sd.spec_decode.naive", "NaiveProposer"),
}


def create_proposer(config: SpeculativeConfig) -> Proposer:
    """Make the configured method.

    Raises:
        ConfigError: no method has that name; the message suggests the nearest one.
    """
    if config.method not in _METHODS:
        known, near = ", ".join(sorted(_METHODS)), suggest(config.method, _METHODS)
        raise ConfigError(
            f"speculative_config.method: expected one of {known}, got {config.method!r}{near}",
            param="speculative_config",
        )
    module, name = _METHODS[config.method]
    return cast(Proposer, getattr(importlib.import_module(module), name)(config))
