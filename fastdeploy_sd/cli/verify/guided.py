"""Grammars for some requests of the matrix. They are about text, so they suit every vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastdeploy_sd.types import Request

# In the syntax of guidance.grammar: text that is forced, text with open ends, words of a list, a JSON schema.
GRAMMARS = (
    r'start: "{\"is_the_first_answer_right\": " ("true" | "false") ", \"number_of_answers\": " /[0-9]{1,3}/ "}"',
    r"start: /[a-z]{2,6}( [a-z]{2,6}){1,9}/",
    'start: CHOICE\nCHOICE: "positive" | "negative" | "neither of them"',
    'start: %json {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 6}',
)
# Of each seven requests; samplings, phrases and wishes for drafts come round in other numbers, so all of them meet.
_GUIDED_OF_SEVEN = (3, 6)


def with_grammars(requests: Sequence[Request], max_tokens: int) -> list[Request]:
    """Return the requests, some with a grammar and the longest output; not those that must not end before a length."""
    guided = [i for i, r in enumerate(requests) if i % 7 in _GUIDED_OF_SEVEN and not r.sampling.min_tokens]
    found = list(requests)
    for number, i in enumerate(guided):
        found[i] = replace(found[i], grammar=GRAMMARS[number % len(GRAMMARS)], max_tokens=max_tokens)
    return found
