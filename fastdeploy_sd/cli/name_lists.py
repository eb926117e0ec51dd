"""Lists of names in one option, as in `--methods ngram,suffix`. Knows no names."""

from __future__ import annotations


def read_names(text: str) -> list[str]:
    """Return the names between the commas, each once and in the order of its first place."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))
