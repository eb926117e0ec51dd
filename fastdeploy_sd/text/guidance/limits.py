"""How much a grammar may cost in total and per step, and the library's errors in words for a client.

A request with expensive masks gets fewer drafts, as each has a mask of its own. A mask that is more than its share of
a step is computed outside of the step; if that lasts too long, the request ends.
"""

from __future__ import annotations

import re

from llguidance import LLParserLimits

# Fuel is the library's measure of work: some 50,000 units per ms while a grammar is read, 14,000 per ms in a step.
# Items are the parser's alternatives, in a row (after one token) and in a step (at all tokens that it tries).
#
# A client's own grammar may be ambiguous, and then takes time of the square of its items: these limits keep one
# operation of the library below some 0.2 s.
OWN_LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=8_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# JSON says by its brackets and commas what is part of what, so a schema has no more items than its own size allows: one
# of 1,000 optional properties needs 4,000 in a row.
SCHEMA_LIMITS = LLParserLimits(
    max_items_in_row=5_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=1_000_000,
    step_max_items=60_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
# What stands in a grammar's text and is none of its syntax.
TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_MAX_ERROR_CHARS = 500
# Lines that show where in the grammar's text, and what is said to the library's own users.
_EXCERPT = re.compile(r"\s*\d+ \||\s*\^+\s*$|<non-verbose/>")
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_IN_WORDS = (
    (
        re.compile("Too many items|Current row has"),
        "more alternatives are open at one place than can be followed (optional properties or rules, anyOf, rules that"
        " derive one text in several ways)",
    ),
    (
        re.compile("too many expressions|[Ff]uel|[Tt]oo many states"),
        "its patterns together take more states than can be followed (pattern, multipleOf, bounds, regular"
        " expressions)",
    ),
)
_PREFIXES = ("failed to compile JSON schema: ", "Parser Error: ", "parser error: ", "lexer error: ", "Lexer Error: ")


def limits_of(grammar: str) -> LLParserLimits:
    """Return the limits for a grammar: those of schemas where one is embedded, which no client can do by itself."""
    return SCHEMA_LIMITS if "%json" in TEXT_OR_COMMENT.sub(" ", grammar) else OWN_LIMITS


def library_error(text: str, *, shows_place: bool = False) -> str:
    """Return what the library says of a grammar in one line; `shows_place` keeps "at LINE(COLUMN)"."""
    lines = [line.strip() for line in text.splitlines() if not _EXCERPT.match(line)]
    line = " ".join(filter(None, lines)).replace("<non-verbose/>", "").strip()
    line = line if shows_place else _PLACE.sub("", line)
    for prefix in _PREFIXES:
        line = line.removeprefix(prefix)
    line = next((words for pattern, words in _IN_WORDS if pattern.search(line)), line)
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 3] + "..."


# The library writes text that is forced out in full, in each step anew: some 10 ms for 50,000 characters.
MAX_EXPANDED = 20_000
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]?", re.DOTALL)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_MAX_DIGITS = 9


def check_repeats(regex: str) -> None:
    """Raise ValueError of a regular expression that is too long with `x{5}` written as `xxxxx`. Malformed ones pass."""
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


# Processor time that grammars may add to a step: together, or where many requests have one, each.
STEP_S = 0.020
REQUEST_S = 0.001
# What a request may take beyond STEP_S for each of its tokens.
DEBT_S = 10.0
# An expensive mask is remembered for some twenty more: they often come again.
_FADE = 7 / 8
_MANY_ROWS = 1 << 20


def share_s(num_requests: int) -> float:
    """Return what each of so many requests with a grammar may take of a step, in seconds."""
    return max(STEP_S / max(num_requests, 1), REQUEST_S)


class MaskCost:
    """The cost of one request's masks, which limits its drafts: seconds a row, and seconds beyond STEP_S."""

    __slots__ = ("debt_s", "row_s")

    def __init__(self) -> None:
        self.row_s = self.debt_s = 0.0

    def note(self, num_rows: int, seconds: float, num_tokens: int = 1) -> None:
        """Count rows that took so long together, for so many tokens of output."""
        self.row_s = max(seconds / max(num_rows, 1), self.row_s * _FADE)
        self.debt_s = max(self.debt_s + seconds - STEP_S * num_tokens, 0.0)

    def max_rows(self, share: float) -> int:
        """Return how many rows the next step may have; 0 = they are computed off the step."""
        return int(share / self.row_s) if self.row_s * _MANY_ROWS > share else _MANY_ROWS

    @property
    def is_too_much(self) -> bool:
        """Whether the request must end."""
        return self.debt_s > DEBT_S
