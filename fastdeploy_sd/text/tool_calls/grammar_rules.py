"""The text of a grammar while it is put together.

Source: the syntax is that of llguidance (docs/syntax.md there), a dialect of Lark's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# As chat templates write JSON; free white space invites a model to write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarRules:
    """Rules by name.

    Args:
        hidden_ids: text -> id of the tokens that text does not show; they stand in a grammar as tokens.
    """

    def __init__(self, hidden_ids: Mapping[str, int]) -> None:
        self._hidden_ids = hidden_ids
        words = sorted(hidden_ids, key=len, reverse=True)
        self._hidden = re.compile("(" + "|".join(map(re.escape, words)) + ")") if words else None
        self._lines: list[str] = []

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        return self._add("r", body, attributes)

    def add_terminal(self, body: str) -> str:
        """Add a rule that is one regular expression, and return its name."""
        return self._add("T", body, "")

    def _add(self, kind: str, body: str, attributes: str) -> str:
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def id_of(self, text: str) -> int | None:
        """Return the id of a text that is one hidden token, None when it is not."""
        return self._hidden_ids.get(text)

    def literal(self, text: str) -> str:
        """Return what matches exactly this text, "" for none."""
        parts = [text] if self._hidden is None else self._hidden.split(text)
        return " ".join(map(self._symbol, filter(None, parts)))

    def quoted(self, text: str) -> str:
        """Return what matches exactly this text, in which no hidden token acts."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Mapping[str, Any], *, is_lenient: bool) -> str:
        """Return what matches JSON of a schema.

        Args:
            is_lenient: keywords that the library does not know are passed over, else the grammar is refused.
        """
        options = {**_SPACING, "lenient": True} if is_lenient else _SPACING
        return self.add(f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")

    def text(self, start: str) -> str:
        """Return the grammar, whose whole is this."""
        return "\n".join((f"start: {start}", *self._lines))

    def _symbol(self, text: str) -> str:
        token_id = self.id_of(text)
        return self.quoted(text) if token_id is None else f"<[{token_id}]>"
