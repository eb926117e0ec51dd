"""Write the generated option tables into docs/configuration.md; `scripts/dev fmt` runs it.

Usage: python scripts/config_docs.py

Text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is replaced; a test fails when the page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastdeploy_sd.config.catalogue import options_markdown, speculative_markdown, unsupported_markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
# Before, the opening marker, the closing marker, after.
_PARTS = 4


def with_tables(page: str) -> str:
    """Return the page with its tables as the code has them now.

    Raises:
        ValueError: a pair of markers is missing.
    """
    tables = {
        "options": options_markdown(),
        "speculative": speculative_markdown(),
        "unsupported": unsupported_markdown(),
    }
    for name, table in tables.items():
        pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
        # Split, not substituted: a table may hold what a replacement pattern would interpret.
        parts = re.split(pattern, page, flags=re.DOTALL)
        if len(parts) != _PARTS:
            raise ValueError(f"{PAGE.name}: expected one pair of '{name}' markers, got {(len(parts) - 1) // 3}")
        before, begin, end, after = parts
        page = before + begin + table + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
