"""Computes the length of a regular expression with its counted repetitions expanded, as the grammar library does."""

from __future__ import annotations

import re

# The library writes text that is forced out in full, in each step anew: some 10 ms for 50,000 characters.
MAX_EXPANDED = 20_000
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]?", re.DOTALL)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_MAX_DIGITS = 9


def check_repeats(regex: str) -> None:
    """Refuse a regular expression that is too long when `x{5}` is written as `xxxxx`.

    What is no regular expression passes: it is for the library to refuse.

    Raises:
        ValueError: "expected ..., got ...".
    """
    sizes, last, i = [0], 0, 0  # of the groups that are open; of what a repetition would be about
    while i < len(regex):
        count = _COUNT.match(regex, i) if regex[i] == "{" else None
        if count is not None and count[1] + count[3]:
            repeated = last * _times(count)
            sizes[-1] += repeated - last
            last, i = repeated, count.end()
        elif regex[i] == "(":
            sizes.append(0)
            i += 1
        elif regex[i] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
            i += 1
        else:
            i = _end_of_atom(regex, i)
            last = 1
            sizes[-1] += 1
        if sizes[-1] > MAX_EXPANDED:
            raise ValueError(
                f"expected a regular expression of at most {MAX_EXPANDED} characters with its repetitions written out,"
                " got a longer one"
            )


def _times(count: re.Match[str]) -> int:
    numbers = [int(digits) for digits in (count[1], count[3]) if digits and len(digits) <= _MAX_DIGITS]
    too_long = any(len(digits) > _MAX_DIGITS for digits in (count[1], count[3]))
    return 10**_MAX_DIGITS if too_long else max([1, *numbers])


def _end_of_atom(regex: str, start: int) -> int:
    if regex[start] == "\\":
        return start + 2
    if regex[start] == "[":
        found = _CLASS.match(regex, start)
        assert found is not None, "a bracket opens a class"
        return found.end()
    return start + 1
