"""Log-probabilities of a prompt's tokens as clients read them, and where the tokens are in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy_sd.text.detokenizer import create_detokenizer
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """What the model said of a token at one place of a prompt; `rank` is 1 for the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs(
    prompt_token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None]:
    """Return per prompt token itself and the `num_top` best at its place, by id; None for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode([token_id], skip_hidden=False))

    found: list[dict[int, Logprob] | None] = [None]
    for own in logprobs.entries(prompt_token_ids, num_top):
        at = {own.token_id: entry(own.token_id, own.logprob, own.rank)}
        for rank, (token_id, logprob) in enumerate(zip(own.top_token_ids, own.top_logprobs, strict=True), 1):
            at.setdefault(token_id, entry(token_id, logprob, rank))
        found.append(at)
    return found


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return where each token's text starts in the text of all, control tokens included."""
    detokenizer = create_detokenizer(tokenizer, (), tokenizer.hidden_ids)
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.push(token_id))
    return offsets
