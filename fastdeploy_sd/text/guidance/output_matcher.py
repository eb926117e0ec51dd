"""The position of one request in its grammar: advances over the output and says which tokens may or must follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from llguidance import LLMatcher

from fastdeploy_sd.text.guidance.limits import library_error


class WornError(Exception):
    """The automata are at their limit, so that the library cannot tell what may follow; see `renew`."""


class OutputMatcher:
    """A matcher of one request, and the ids that end it; `error`, if any, says why the output cannot go on.

    The library's matcher takes one uncounted ending token after a complete grammar; here it is a token as any other.
    What may come later is found by copies: `rollback` leaves a wrong state after tokens that a grammar names by ids.
    """

    def __init__(self, matcher: LLMatcher, end_token_ids: tuple[int, ...], renewed: Callable[[], LLMatcher]) -> None:
        self._matcher, self._renewed = matcher, renewed
        self._output: list[int] = []
        # Tokens that must follow the output, from an index on: the library finds all at once, be it thousands.
        self._forced: list[int] = []
        self._next_forced = 0
        self._ends = frozenset(end_token_ids)
        self._first_end, self.error = end_token_ids[0], ""
        self._has_ended = False

    def consume(self, token_ids: list[int]) -> None:
        """Continue after output, up to an id that ends the request. After WornError, `renew` and try again."""
        if self.error or self._has_ended:
            return
        try:
            num_taken = self._matcher.try_consume_tokens(token_ids)
            is_whole = num_taken == len(token_ids) or not self._ends.isdisjoint(token_ids[: num_taken + 1])
            is_worn = not is_whole and self._is_worn()
        except Exception as error:  # the library promises that it raises none
            self.error = library_error(repr(error))
            return
        if is_worn:
            raise WornError
        self._output += token_ids[:num_taken]
        self._follow_forced(token_ids[:num_taken])
        self._has_ended = not self._ends.isdisjoint(token_ids[:num_taken])
        if num_taken < len(token_ids) and not self._has_ended:
            self._has_ended = self._is_end(self._matcher, token_ids[num_taken])
            if not self._has_ended:
                self.error = f"token {token_ids[num_taken]} of the output is none that the grammar allows"

    def states(
        self, token_ids: Sequence[int], parents: Sequence[int] | None = None
    ) -> Iterator[tuple[int, LLMatcher | None]]:
        """Make matchers after none of the tokens, 0, and after the path to each that is allowed, 1 + its index.

        It is None after an id that ends the request. May raise WornError.

        Args:
            parents: the token that each one follows, an earlier one or -1 = none; None = the one before it.
        """
        if self.error or self._has_ended:
            return
        after = {-1: self._matcher.deep_copy()}
        yield 0, after[-1]
        for i, (parent, token_id) in enumerate(zip(parents or range(-1, len(token_ids) - 1), token_ids, strict=True)):
            if (last := after.get(parent)) is None:
                continue
            following = last.deep_copy()
            is_taken = following.try_consume_tokens([token_id]) == 1
            if token_id in self._ends and (is_taken or self._is_end(last, token_id)):
                yield i + 1, None
                continue
            if following.is_error():
                raise WornError
            if is_taken:
                after[i] = following
                yield i + 1, following

    def renew(self) -> list[int]:
        """Begin anew with new automata, for what compiling costs; return the output, which must be consumed again."""
        matcher = self._renewed()
        self._matcher, output, self._output = matcher, self._output, []
        self._forced, self._next_forced = [], 0
        return output

    def refuse(self, reason: str) -> None:
        """Have the output end here; "" = the library says why."""
        if not reason:
            probe = self._matcher.deep_copy()
            probe.compute_bitmask()
            reason = library_error(probe.get_error())
        self.error = self.error or reason or "it cannot be followed any further"

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> list[int]:
        """Return the indices of those tokens that may follow the output, as far as is known; see `states`."""
        found = list[int]()
        with contextlib.suppress(WornError):
            found.extend(row - 1 for row, _ in self.states(token_ids, parents) if row > 0)
        return found

    def forced(self, max_tokens: int) -> list[int]:
        """Return at most so many tokens that must follow, the first ending id after a complete output."""
        if max_tokens <= 0 or self.error or self._has_ended:
            return []
        if len(self._forced) - self._next_forced < max_tokens:
            self._forced, self._next_forced = self._matcher.deep_copy().compute_ff_tokens(), 0
        tokens = self._forced[self._next_forced : self._next_forced + max_tokens]
        if len(tokens) == max_tokens:
            return tokens
        end = self._matcher.deep_copy()
        if end.try_consume_tokens(tokens) == len(tokens) and self._is_end(end, self._first_end):
            tokens.append(self._first_end)
        return tokens

    def _follow_forced(self, token_ids: list[int]) -> None:
        begin, self._next_forced = self._next_forced, self._next_forced + len(token_ids)
        if self._forced[begin : self._next_forced] != token_ids:
            self._forced, self._next_forced = [], 0

    def _is_worn(self) -> bool:
        """Whether the automata are at their limit: then a token may be refused that is allowed."""
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        return bool(probe.is_error())

    def _is_end(self, matcher: LLMatcher, token_id: int) -> bool:
        """Whether a token ends the request after a matcher that accepts no more tokens."""
        return token_id in self._ends and matcher.is_stopped() and not matcher.is_error()
