"""TokenLogprob and DraftLogprob -> OpenAI's two JSON shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from fastdeploy_sd.text.prompt_logprobs import prompt_logprobs
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import DraftLogprob, PromptLogprobs, TokenLogprob

# JSON has no infinity; this is what OpenAI's clients are used to.
_LOWEST_LOGPROB = -9999.0


class LogprobsFormat:
    """Log-probabilities of one tokenizer's tokens as JSON.

    `names_ids`: tokens are "token_id:<id>", as vLLM writes them, instead of text.
    """

    def __init__(self, tokenizer: Tokenizer, *, names_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._names_ids = names_ids

    def chat(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return `choices[].logprobs` of a chat completion."""
        return {"content": self.entries(logprobs), "refusal": None}

    def entries(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Return per token itself and the best alternatives."""
        return [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": list(map(self._entry, entry.top_token_ids, entry.top_logprobs))}
            for entry in logprobs
        ]

    def completion(self, logprobs: Sequence[TokenLogprob], text_offsets: Iterable[int]) -> dict[str, Any]:
        """Return `choices[].logprobs` of a text completion; the chosen token is always among its alternatives.

        `text_offsets`: int[n], where each token's text starts in the choice's text.
        """
        return {
            "tokens": [self._label(entry.token_id) for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._alternatives(entry) for entry in logprobs],
            "text_offset": list(text_offsets),
        }

    def echoed(
        self, prompt_token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int, text_offsets: Iterable[int]
    ) -> dict[str, Any]:
        """Return the part of `choices[].logprobs` that is of an echoed prompt; its first token has none."""
        part = self.completion(logprobs.entries(prompt_token_ids, num_top), text_offsets)
        part["tokens"].insert(0, self._label(prompt_token_ids[0]))
        for name in ("token_logprobs", "top_logprobs"):
            part[name].insert(0, None)
        return part

    def prompt(
        self, prompt_token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int
    ) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs` as vLLM writes it: per token itself and the best at its place, by id."""
        found: list[dict[str, Any] | None] = [None]
        for at in prompt_logprobs(prompt_token_ids, logprobs, num_top, self._tokenizer)[1:]:
            assert at is not None, "only the first token has none"
            found.append({str(i): asdict(entry) | {"logprob": _finite(entry.logprob)} for i, entry in at.items()})
        return found

    def chat_drafts(self, drafts: Sequence[DraftLogprob]) -> dict[str, Any]:
        """Return the logprobs of a chat's drafts, each with its `position` in its step and whether `accepted`."""
        logprobs = self.chat([d.draft for d in drafts])
        for entry, draft in zip(logprobs["content"], drafts, strict=True):
            entry["position"], entry["accepted"] = draft.position, draft.accepted
        return logprobs

    def completion_drafts(self, drafts: Sequence[DraftLogprob], text_offsets: Iterable[int]) -> dict[str, Any]:
        """Return `choices[].draft_logprobs` of a text completion: as logprobs, with `position` and `accepted`.

        Args:
            drafts: D of them.
            text_offsets: int[D], where the text of the token at each draft's position starts in the choice's text.
        """
        return self.completion([d.draft for d in drafts], text_offsets) | {
            "position": [d.position for d in drafts],
            "accepted": [d.accepted for d in drafts],
        }

    def _label(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_ids else token_label(self._tokenizer, token_id)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._label(token_id),
            "logprob": _finite(logprob),
            "bytes": list(_token_bytes(self._tokenizer, token_id)),
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        best = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        labelled = {self._label(token_id): _finite(logprob) for token_id, logprob in best}
        return labelled | {self._label(entry.token_id): _finite(entry.logprob)}


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Return a token's text, or "bytes:\xe2\x80" when it is not whole characters, as OpenAI writes it."""
    data = _token_bytes(tokenizer, token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    data = tokenizer.token_bytes(token_id)
    return tokenizer.decode([token_id], skip_hidden=False).encode("utf-8") if data is None else data


def _finite(logprob: float) -> float:
    """What JSON can hold: -infinity as the lowest number there is here, and NaN, which nothing should make, as well."""
    return logprob if logprob >= _LOWEST_LOGPROB else _LOWEST_LOGPROB
