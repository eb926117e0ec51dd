"""TokenLogprob and DraftLogprob -> OpenAI's two JSON shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastdeploy_sd.entrypoints.text.tokenizer import Tokenizer
from fastdeploy_sd.types import DraftLogprob, TokenLogprob

# JSON has no infinity; this is what OpenAI's clients are used to.
_LOWEST_LOGPROB = -9999.0


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion: per token itself and the best alternatives."""
    return {
        "content": [
            _chat_entry(tokenizer, entry.token_id, entry.logprob)
            | {
                "top_logprobs": [
                    _chat_entry(tokenizer, token_id, logprob)
                    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                ]
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], text_offsets: Iterable[int]
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a text completion; the chosen token is always among its alternatives.

    Args:
        tokenizer: names the tokens.
        logprobs: one per token.
        text_offsets: int[n], where each token's text starts in the choice's text.
    """
    return {
        "tokens": [token_label(tokenizer, entry.token_id) for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_alternatives(tokenizer, entry) for entry in logprobs],
        "text_offset": list(text_offsets),
    }


def chat_draft_logprobs(tokenizer: Tokenizer, drafts: Sequence[DraftLogprob]) -> dict[str, Any]:
    """Return `choices[].draft_logprobs` of a chat completion: as logprobs, and what became of each draft.

    `position` counts the drafts of a step from 0; `accepted` says whether the draft became output.
    """
    logprobs = chat_logprobs(tokenizer, [d.draft for d in drafts])
    for entry, draft in zip(logprobs["content"], drafts, strict=True):
        entry["position"], entry["accepted"] = draft.position, draft.accepted
    return logprobs


def completion_draft_logprobs(
    tokenizer: Tokenizer, drafts: Sequence[DraftLogprob], text_offsets: Iterable[int]
) -> dict[str, Any]:
    """Return `choices[].draft_logprobs` of a text completion: as logprobs, with `position` and `accepted` as in chat.

    Args:
        tokenizer: names the tokens.
        drafts: D of them.
        text_offsets: int[D], where the text of the token at each draft's position starts in the choice's text.
    """
    return completion_logprobs(tokenizer, [d.draft for d in drafts], text_offsets) | {
        "position": [d.position for d in drafts],
        "accepted": [d.accepted for d in drafts],
    }


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token's text, or "bytes:\xe2\x80" when it is not whole characters, as OpenAI writes it."""
    data = _token_bytes(tokenizer, token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_label(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(_token_bytes(tokenizer, token_id)),
    }


def _alternatives(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    best = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    labelled = {token_label(tokenizer, token_id): _finite(logprob) for token_id, logprob in best}
    return labelled | {token_label(tokenizer, entry.token_id): _finite(entry.logprob)}


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    data = tokenizer.token_bytes(token_id)
    return tokenizer.decode([token_id], skip_hidden=False).encode("utf-8") if data is None else data


def _finite(logprob: float) -> float:
    """What JSON can hold: -infinity as the lowest number there is here, and NaN, which nothing should make, as well."""
    return logprob if logprob >= _LOWEST_LOGPROB else _LOWEST_LOGPROB
