"""Checks that a grammar compiles and that some text can begin it, before a request reaches an engine."""

from __future__ import annotations

import random
import re
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.guidance.limits import library_error, limits_of
from fastdeploy_sd.text.guidance.vocabulary import VocabularyError, make_vocabulary
from fastdeploy_sd.text.tokenizer import Tokenizer

# A shorter one cannot have too many alternatives at one place from its beginning.
_MIN_TRIED_CHARS = 1_000
# Steps into a grammar that are tried, and tokens of each where they are forced.
_NUM_TRIED = 8
_MAX_TRIED_FORCED = 16
# Where text is forced no more tokens than that begin it; and so many places are looked at for one that is not.
_MAX_FORCED_WAYS = 32
_MAX_WAYS_TRIED = 64


class GrammarChecker:
    """Compiles grammars as an engine would, and forgets them; without a vocabulary it refuses all for `reason`."""

    def __init__(self, vocabulary: LLTokenizer | None, reason: str = "") -> None:
        self._vocabulary, self._reason = vocabulary, reason

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GrammarChecker:
        """Return the checker for a model, whose vocabulary is taken to be the tokenizer's."""
        try:
            return cls(make_vocabulary(tokenizer, tokenizer.num_ids, ()))
        except VocabularyError as error:
            return cls(None, error.message)

    def verify(self, grammar: str, field: str, forbidden: Collection[int] = ()) -> None:
        """Raise BadRequest of a grammar that an engine would refuse, or that no text satisfies.

        `forbidden` are tokens that `field` forbids in the output of a grammar that was verified before.
        """
        param = re.split(r"[.\[]", field, maxsplit=1)[0]
        if self._vocabulary is None:
            text = f"{field}: not supported: {self._reason}"
            raise BadRequest(text, param=param, code="not_supported")
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits_of(grammar))
        allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            error = library_error(matcher.get_error(), shows_place=field.endswith("grammar"))
            raise BadRequest(f"{field}: expected what can be compiled, got: {error}", param=param)
        if not any(allowed):
            raise BadRequest(f"{field}: expected what some text satisfies, got what none does", param=param)
        if forbidden:
            if not _has_way_without(matcher, frozenset(forbidden)):
                text = "expected none that the form of the answer needs, got what it cannot begin without"
                raise BadRequest(f"{field}: {text}", param=param)
            return
        error = _first_error(matcher, allowed) if len(grammar) > _MIN_TRIED_CHARS else ""
        if error:
            raise BadRequest(f"{field}: expected what can be followed to its end, got: {error}", param=param)


def _has_way_without(matcher: LLMatcher, forbidden: frozenset[int]) -> bool:
    """Whether a text can begin without these tokens: some way through what is forced comes to where much is allowed."""
    states, num_tried = [matcher], 0
    while states:
        state, num_tried = states.pop(), num_tried + 1
        bits = np.frombuffer(state.deep_copy().compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        left = [token_id for token_id in allowed if token_id not in forbidden]
        if len(left) > _MAX_FORCED_WAYS or num_tried > _MAX_WAYS_TRIED:
            return True
        for token_id in left:
            following = state.deep_copy()
            if not following.consume_token(token_id) or following.is_stopped():
                return True  # it ends here, or that is not known
            states.append(following)
    return False


def _first_error(matcher: LLMatcher, allowed: bytes) -> str:
    """Return why a text of a few tokens cannot be followed, as the grammar is too large; "" = it can."""
    choice, first = random.Random(0), (matcher, allowed)
    matcher = matcher.deep_copy()
    for _ in range(_NUM_TRIED):
        state = matcher.deep_copy()
        token_ids = state.compute_ff_tokens()[:_MAX_TRIED_FORCED]
        if not token_ids:
            allowed_ids = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little").nonzero()[0]
            token_ids = [int(choice.choice(allowed_ids))]
        is_end = matcher.try_consume_tokens(token_ids) < len(token_ids) or matcher.is_stopped()
        allowed = b"" if is_end or matcher.is_error() else matcher.compute_bitmask()
        if state.is_error() or matcher.is_error():
            return library_error(state.get_error() or matcher.get_error())
        if not any(allowed):  # it was short
            matcher, allowed = first[0].deep_copy(), first[1]
    return ""
