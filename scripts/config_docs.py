"""Write the generated tables of options and metrics into the pages of docs/; `scripts/dev fmt` runs it.

Usage: python scripts/config_docs.py

Text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is replaced; a test fails when a page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from fastdeploy_sd.cluster.router.options import OPTIONS as ROUTER_OPTIONS
from fastdeploy_sd.config.aliases import LLAMA_CPP, SGLANG, VLLM
from fastdeploy_sd.config.tables import (
    migration_markdown,
    no_effect_markdown,
    options_markdown,
    speculative_markdown,
    table_of,
    unsupported_markdown,
)
from fastdeploy_sd.metrics.documentation import metrics_markdown, router_metrics_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Page -> marker -> its table.
TABLES = {
    "configuration.md": {"options": options_markdown(), "speculative": speculative_markdown()},
    "unsupported.md": {"unsupported": unsupported_markdown(), "no-effect": no_effect_markdown()},
    "metrics.md": {"metrics": metrics_markdown(), "router": router_metrics_markdown()},
    "deployment.md": {"router": table_of(opt for opt in ROUTER_OPTIONS if opt.section == "routing")},
    "migration.md": {program.lower(): migration_markdown(program) for program in (VLLM, SGLANG, LLAMA_CPP)},
}
# Before, the opening marker, the closing marker, after.
_PARTS = 4


def with_tables(name: str) -> str:
    """Return a page of TABLES with its tables as the code has them now.

    Raises:
        ValueError: a pair of markers is missing.
    """
    page = (DOCS / name).read_text(encoding="utf-8")
    for marker, table in TABLES[name].items():
        pattern = rf"(<!-- {re.escape(marker)}: begin -->\n).*?(<!-- {re.escape(marker)}: end -->)"
        # Split, not substituted: a table may hold what a replacement pattern would interpret.
        parts = re.split(pattern, page, flags=re.DOTALL)
        if len(parts) != _PARTS:
            raise ValueError(f"{name}: expected one pair of '{marker}' markers, got {(len(parts) - 1) // 3}")
        before, begin, end, after = parts
        page = before + begin + table + end + after
    return page


if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(with_tables(name), encoding="utf-8")
