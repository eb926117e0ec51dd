"""What a prefill instance runs of a request that another instance owns. Knows no engine."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.disaggregation.transfer.events import TransferId
from fastdeploy_sd.types import Request, Speculation, SpeculationInfo
from fastdeploy_sd.types.draft_methods import METHODS

# Room after the first token for as many drafts as there may be, and the token after them.
_NUM_MORE_TOKENS = 2


def prompt_only(request: Request, transfer_id: TransferId, info: SpeculationInfo) -> Request:
    """Return the request of an order as this instance can run it: it asks for nothing that only its owner has."""
    asked, num_drafts = request.speculation, request.speculation.num_speculative_tokens
    method = asked.method if asked.method in info.methods else None
    # A model that reads only tokens would run the whole prompt for the few drafts that are handed over.
    model = info.draft_model_of(method or info.method)
    may_draft = not model or METHODS[model].reads_hidden
    max_tokens = min(request.max_tokens, 1 + info.max_draft_tokens + _NUM_MORE_TOKENS)
    min_tokens = min(request.sampling.min_tokens, max_tokens)
    return replace(
        request,
        request_id=transfer_id,
        sampling=replace(
            request.sampling, logprobs=None, prompt_logprobs=None, min_tokens=min_tokens, max_tokens=max_tokens
        ),
        max_tokens=max_tokens,
        arrival_time=0.0,
        speculation=Speculation(
            enabled=asked.enabled and may_draft,
            method=method,
            num_speculative_tokens=min(num_drafts, info.max_draft_tokens) or None if num_drafts is not None else None,
        ),
        kv_source=None,
        pooling=None,
    )
