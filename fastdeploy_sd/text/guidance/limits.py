"""How much a grammar may cost in total and per step, and the library's errors in words for a client."""

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
    """Return what the library says of a grammar in one line, without its excerpt of the grammar.

    Args:
        shows_place: keep "at LINE(COLUMN)", for a grammar that a client has written itself.
    """
    lines = [line.strip() for line in text.splitlines() if not _EXCERPT.match(line)]
    line = " ".join(filter(None, lines)).replace("<non-verbose/>", "").strip()
    line = line if shows_place else _PLACE.sub("", line)
    for prefix in _PREFIXES:
        line = line.removeprefix(prefix)
    line = next((words for pattern, words in _IN_WORDS if pattern.search(line)), line)
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 3] + "..."
