"""TokenRules: rare options of a request that are applied to each row of its logits. Knows no step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_sd.types import Request


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """The rules of one request that are applied per logits row.

    Attributes:
        num_prompt_tokens: output token i is at position num_prompt_tokens + i.
        bad_tokens: bad words of one token, forbidden everywhere.
        bad_words: longer sequences that may not be completed, by their last token but one: a row's last token selects
            the few that it may complete.
        num_bad_prefix: tokens of the longest bad word before its last one.
        min_tokens, end_token_ids: the ids forbidden while fewer than min_tokens tokens were produced.
    """

    num_prompt_tokens: int
    bad_tokens: frozenset[int]
    bad_words: Mapping[int, Sequence[tuple[int, ...]]]
    num_bad_prefix: int
    min_tokens: int
    end_token_ids: tuple[int, ...]

    @property
    def has_bad_words(self) -> bool:
        """Whether some token may be forbidden at any row."""
        return bool(self.bad_tokens or self.bad_words)

    @property
    def has_mask(self) -> bool:
        """Whether some token may be forbidden at some row."""
        return self.has_bad_words or (self.min_tokens > 0 and bool(self.end_token_ids))

    def forbidden(self, recent: tuple[int, ...], num_output: int) -> list[int]:
        """Return the ids that may not come next, rising.

        Args:
            recent: the last tokens, drafts before the row included: at least as many as a bad word has before its last.
            num_output: how many tokens were produced, these drafts included.
        """
        found = set(self.bad_tokens)
        if recent:
            endings = self.bad_words.get(recent[-1], ())
            found.update(words[-1] for words in endings if _ends_with(recent, words[:-1]))
        if num_output < self.min_tokens:
            found.update(self.end_token_ids)
        return sorted(found)

    @staticmethod
    def of(request: Request, num_prompt_tokens: int) -> TokenRules:
        """Collect a request's rules."""
        s = request.sampling
        ends = (() if s.ignore_eos else request.eos_token_ids) + s.stop_token_ids
        bad = request.bad_words_token_ids
        bad_words: dict[int, list[tuple[int, ...]]] = {}
        for words in bad:
            if len(words) > 1:
                bad_words.setdefault(words[-2], []).append(words)
        return TokenRules(
            num_prompt_tokens,
            frozenset(words[0] for words in bad if len(words) == 1),
            bad_words,
            max((len(words) - 1 for words in bad), default=0),
            s.min_tokens,
            tuple(dict.fromkeys(ends)),
        )


def _ends_with(tokens: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    return len(tail) <= len(tokens) and tokens[len(tokens) - len(tail) :] == tail
