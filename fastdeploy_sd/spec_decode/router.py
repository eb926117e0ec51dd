"""Every request drafts with the method it chose. Knows which methods a server offers, and not how they draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.draft_rows import Rows, merge_drafts, select_rows
from fastdeploy_sd.spec_decode.hybrid import HybridProposer
from fastdeploy_sd.spec_decode.proposer import (
    DraftRequest,
    ProposeInput,
    Proposer,
    ProposerContext,
    create_method,
)
from fastdeploy_sd.types import I8, I32, DraftTokens

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

# Need nothing loaded, so every server that speculates offers them.
_MODEL_FREE = ("naive", "ngram", "suffix")
# mtp_strategy -> the method that continues what MTP drafted.
_EXTENDED_BY = {"with_ngram": "ngram", "with_suffix": "suffix"}
_NOBODY = -1


def available_methods(config: SpeculativeConfig) -> tuple[str, ...]:
    """Return what requests may name as their method; a hybrid goes by the name of its first method."""
    if config.method == "naive":
        return ("naive",)
    return _MODEL_FREE if config.method in _MODEL_FREE else (*_MODEL_FREE, config.method)


class MethodRouter:
    """Hands every request to its own method, and puts the drafts of all methods together.

    A method sees its own requests only, except the one that runs a model: it gets all rows of the step, as the model
    ran them, with no drafts allowed in the others'. The configured method is made at once; the others, which run no
    model, when the first request asks for them. Each is guarded by itself: a second try for a row must not repeat what
    another method has done for it.

    Args:
        config: names the method of requests that name none.
        context: what the methods are made for.

    Raises:
        ConfigError: the configured method cannot be made.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        self._config, self._context = config, context
        self._names = available_methods(config)
        self._made: dict[int, Proposer] = {}
        # i8[max_num_seqs], index into _names
        self._method_of_slot = np.full(context.max_num_seqs, _NOBODY, np.int8)
        # The slots of the last step, and what `_methods_of` says of them; None after a slot was forgotten.
        self._last: tuple[I32, tuple[I8, list[int]]] | None = None
        self._configured = self._names.index(config.method)
        configured = self._method(self._configured)
        if config.method == "mtp" and config.mtp_strategy in _EXTENDED_BY:
            # Shared with the requests that name it: what one of them learns from finished outputs serves both.
            rest = self._method(self._names.index(_EXTENDED_BY[config.mtp_strategy]))
            configured = HybridProposer(configured, rest, context.max_num_seqs)
            self._made[self._configured] = configured
        if config.suffix_decoding_cache_file is not None:
            # A file that cannot be read must stop the server here, not in the step of the first request.
            self._method(self._names.index("suffix"))
        self._num_lookahead_slots = configured.num_lookahead_slots

    @property
    def num_lookahead_slots(self) -> int:
        """What the configured method writes; the others run no model and write none."""
        return self._num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Hand every request to the method it names, the configured one if it names none.

        Raises:
            InternalError: a request names a method that is not available here.
        """
        groups: dict[int, list[DraftRequest]] = {}
        for request in requests:
            groups.setdefault(self._index_of(request), []).append(request)
        for method, group in groups.items():
            self._method_of_slot[[request.slot for request in group]] = method
            self._method(method).begin(group)

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Let every method draft for its requests.

        Raises:
            InternalError: a slot was not begun.
        """
        if self._last is None or self._last[0] is not x.slots:
            self._last = x.slots, self._methods_of(x.slots)
        owners, present = self._last[1]
        if not present:
            return DraftTokens.none(0)
        if len(present) == 1:
            return self._made[present[0]].propose(x)
        return merge_drafts(len(owners), [self._propose_for(method, x, owners == method) for method in present])

    def forget(self, slots: I32) -> None:
        """Forget every slot in the method of its request."""
        self._last = None
        owners = self._method_of_slot[slots]
        for method in np.unique(owners[owners != _NOBODY]).tolist():
            self._made[method].forget(slots[owners == method])
        self._method_of_slot[slots] = _NOBODY

    def close(self) -> None:
        """Close every method that was made."""
        for proposer in self._made.values():
            proposer.close()

    def _methods_of(self, slots: I32) -> tuple[I8, list[int]]:
        """The method of each slot, and every method among them once."""
        owners = self._method_of_slot[slots]
        present = np.unique(owners).tolist()
        if _NOBODY in present:
            raise InternalError(f"slots: expected slots that were begun, got {slots[owners == _NOBODY].tolist()}")
        return owners, present

    def _index_of(self, request: DraftRequest) -> int:
        if not request.method:
            return self._configured
        if request.method not in self._names:
            known = ", ".join(self._names)
            raise InternalError(f"{request.request_id}: method: expected one of {known}, got {request.method!r}")
        return self._names.index(request.method)

    def _method(self, index: int) -> Proposer:
        if index not in self._made:
            self._made[index] = DraftGuard(create_method(self._names[index], self._config, self._context))
        return self._made[index]

    def _propose_for(self, method: int, x: ProposeInput, is_own: npt.NDArray[np.bool_]) -> tuple[Rows, DraftTokens]:
        """The drafts of one method among several, and the rows they belong to."""
        proposer = self._made[method]
        if self._names[method] in _MODEL_FREE:
            rows = np.flatnonzero(is_own)
            return rows, proposer.propose(select_rows(x, rows))
        allowed = np.where(is_own, x.max_draft_len, 0).astype(np.int32)
        return np.arange(len(is_own)), proposer.propose(replace(x, max_draft_len=allowed))
