"""Makes drafting methods, and drafts for every request with its method."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import ConfigError, InternalError, suggest
from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from fastdeploy_sd.spec_decode.methods.hybrid import HybridProposer
from fastdeploy_sd.spec_decode.methods.prediction import PredictionProposer
from fastdeploy_sd.spec_decode.per_request_drafts import PerRequestDrafts, after_drafts, joined
from fastdeploy_sd.spec_decode.proposer import (
    AsyncDrafter,
    DraftRequest,
    DraftsAsync,
    ProposeInput,
    Proposer,
    ProposerContext,
)
from fastdeploy_sd.types import I8, I32, DraftTokens, Rows
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

_NO_METHOD = -1


def available_methods(config: SpeculativeConfig) -> tuple[str, ...]:
    """Return the methods that requests may name; a hybrid has the name of its first method."""
    if config.method == NAIVE:
        return (NAIVE,)
    return tuple(
        method.name
        for method in METHODS.values()
        if method.name in (config.method, *config.draft_models) or not (method.needs_model or method.chooses)
    )


def create_method(name: str, config: SpeculativeConfig, context: ProposerContext) -> Proposer:
    """Make one drafting method; raises ConfigError where it is unknown, lacks its model or cannot be made."""
    if name not in METHODS:
        wanted, near = f"one of {', '.join(sorted(METHODS))}", suggest(name, METHODS)
        raise ConfigError(
            f"speculative_config.method: expected {wanted}, got {name!r}{near}", param="speculative_config"
        )
    method = METHODS[name]
    model = context.draft_models.get(name)
    if method.needs_model and model is None:
        raise ConfigError(
            f"speculative_config.method: expected a method that needs no model, as none is loaded, got {name!r}",
            param="speculative_config",
        )
    module, class_name = method.proposer.split(":")
    found = importlib.import_module(module, "fastdeploy_sd.spec_decode")
    make = getattr(found, class_name)
    if model is None:
        return cast(Proposer, make(config, context))
    return context.over_ranks(name, cast(Proposer, make(config, context, model)))


def create_proposer(config: SpeculativeConfig, context: ProposerContext) -> Proposer:
    """Make the server's proposer, for all methods that requests may name; raises as `create_method`."""
    return create_method(NAIVE, config, context) if config.method == NAIVE else MethodDispatcher(config, context)


class NaiveProposer(Proposer):
    """Never drafts: plain decoding is the same path with zero drafts."""

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        del config, context  # every method is made with both

    def propose(self, x: ProposeInput) -> DraftTokens:
        return DraftTokens.none(len(x.request_ids))


class MethodDispatcher:
    """Hands every request to its own method, and merges the drafts of all methods.

    A method sees only its own requests. One that writes KV gets all rows of the step, as the model ran them, and may
    draft only in its own. Per-request methods and predicted outputs draft first; the request's method drafts after
    them. A method that chooses gets these first drafts as a prefix. It may shorten them, so it returns whole rows.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        partial = (*context.per_request_methods, PredictionProposer(context.max_num_seqs))
        self._config = config
        self._context = replace(context, other_method=self._unguarded, per_request_methods=partial)
        self._names = available_methods(config)
        self._made: dict[int, Proposer] = {}
        self._per_request = PerRequestDrafts(partial, context.max_num_seqs)
        self._step_stats = context.step_stats
        self._chooses = np.array([METHODS[name].chooses for name in self._names])
        # i8[max_num_seqs], index into _names
        self._method_of_row = np.full(context.max_num_seqs, _NO_METHOD, np.int8)
        self._configured = self._names.index(config.method)
        configured = self._method(self._configured)
        if config.extended_by is not None:
            # Shared with the requests that name it, so both use what it learns from finished outputs.
            rest = self._method(self._names.index(config.extended_by))
            configured = HybridProposer(configured, rest, context.max_num_seqs)
            self._made[self._configured] = configured
        for index, name in enumerate(self._names):
            # An unreadable file must stop the server here, not in the step of the first request.
            if METHODS[name].file_key and getattr(config, METHODS[name].file_key) is not None:
                self._method(index)
            if name in context.draft_models:  # nothing is recorded once requests run
                self._method(index)
        self._naive = self._names.index(NAIVE) if NAIVE in self._names else self._configured
        self._async_drafter: AsyncDrafter | None = None
        if isinstance(configured, DraftGuard) and isinstance(configured.method, DraftsAsync):
            self._async_drafter = configured.method.async_drafter
        self._num_lookahead_slots = max(made.num_lookahead_slots for made in self._made.values())
        # The input of a step whose requests all have this method and no other drafts. Later steps have the same value.
        self._only: tuple[ProposeInput, Proposer] | None = None

    @property
    def num_lookahead_slots(self) -> int:
        return self._num_lookahead_slots

    @property
    def async_drafter(self) -> AsyncDrafter | None:
        """See DraftsAsync: of the configured method, where it alone drafts."""
        return self._async_drafter

    def is_async(self, table_rows: I32) -> bool:
        """See DraftsAsync: only the configured method drafts; rows that were given up get no drafts."""
        if self._async_drafter is None or not self._per_request.is_idle:
            return False
        return set(self._method_of_row.take(table_rows).tolist()) <= {self._configured, self._naive, _NO_METHOD}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Hand every request to its method; raises InternalError for a method that is not available here."""
        self._only = None
        groups: dict[int, list[DraftRequest]] = {}
        methods = [self._index_of(request) for request in requests]
        for request, method in zip(requests, methods, strict=True):
            self._method_of_row[request.table_row] = method
            groups.setdefault(method, []).append(request)
        for method, group in groups.items():
            self._method(method).begin(group)
        self._per_request.begin(requests, [self._chooses.item(method) for method in methods])

    def propose(self, x: ProposeInput) -> DraftTokens:
        """Let every method draft for its requests, after the drafts of per-request methods."""
        if self._only is not None and self._only[0] is x:
            return self._only[1].propose(x)
        owners, present = self._methods_of(x.table_rows)
        if not present:
            return DraftTokens.none(0)
        self._step_stats.num_forbidden = 0
        if self._naive in present and self._chooses[self._configured]:
            present = self._with_chooser(owners, present)
        is_whole = len(present) == 1 and self._step_stats.num_forbidden == 0
        if is_whole and self._per_request.is_idle:
            self._only = x, self._made[present[0]]
        head = self._per_request.propose(x)
        rest = after_drafts(x, head)
        if is_whole:
            tail = self._made[present[0]].propose(rest)
        else:
            tail = DraftTokens.merge(len(owners), [self._propose_for(m, rest, owners == m) for m in present])
        if head is None:
            return tail
        self._step_stats.skip_draft_steps = 0  # skipped steps would lose the per-request drafts
        return joined(len(owners), head, ~self._chooses[owners], tail)

    def _with_chooser(self, owners: I8, present: list[int]) -> list[int]:
        """Return the methods that draft; the method that chooses is told how many requests forbid drafts.

        It is called also where it has no rows, as it knows how many steps can skip drafting.
        """
        self._step_stats.num_forbidden = int((owners == self._naive).sum())
        return sorted({self._configured if method == self._naive else method for method in present})

    def forget(self, table_rows: I32) -> None:
        self._only = None
        owners = self._method_of_row[table_rows]
        present = set(owners.tolist())
        for method in sorted(present - {_NO_METHOD}):
            self._made[method].forget(table_rows if len(present) == 1 else table_rows[owners == method])
        self._per_request.forget(table_rows)
        self._method_of_row[table_rows] = _NO_METHOD

    def close(self) -> None:
        self._per_request.close()
        for proposer in self._made.values():
            proposer.close()

    def _methods_of(self, table_rows: I32) -> tuple[I8, list[int]]:
        owners = self._method_of_row.take(table_rows)
        present = sorted(set(owners.tolist()))
        if _NO_METHOD in present:
            raise InternalError(
                f"table_rows: expected table rows that were begun, got {table_rows[owners == _NO_METHOD].tolist()}"
            )
        return owners, present

    def _index_of(self, request: DraftRequest) -> int:
        if not request.method:
            return self._configured
        if request.method not in self._names:
            known = ", ".join(self._names)
            raise InternalError(f"{request.request_id}: method: expected one of {known}, got {request.method!r}")
        if request.method in self._config.draft_models[:1]:
            return self._configured  # one that chooses asks it for all requests at once
        return self._names.index(request.method)

    def _method(self, index: int) -> Proposer:
        if index not in self._made:
            name = self._names[index]
            method = create_method(name, self._config, self._context)
            self._made[index] = DraftGuard(method, METHODS[name].source)
        return self._made[index]

    def _unguarded(self, name: str) -> Proposer:
        """Return a method for the method that chooses, which has its own guard; requests that name it share it.

        A method that runs a model is not shared: it gets the requests of the method that chooses.
        """
        method = self._method(self._names.index(name))
        assert isinstance(method, DraftGuard)
        return method.method

    def _propose_for(self, method: int, x: ProposeInput, is_own: npt.NDArray[np.bool_]) -> tuple[Rows, DraftTokens]:
        """Return the drafts of one method among several, and their rows."""
        proposer = self._made[method]
        if proposer.num_lookahead_slots == 0:
            rows = np.flatnonzero(is_own)
            return rows, proposer.propose(x.select(rows))
        allowed = np.where(is_own, x.max_draft_len, 0).astype(np.int32)
        return np.arange(len(is_own)), proposer.propose(replace(x, max_draft_len=allowed))
