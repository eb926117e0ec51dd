"""Links of the documentation lead somewhere, and its commands are accepted or answered as it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page if not name else (page.parent / name).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        todo += [(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(page.read_text("utf-8"))]
    assert set((ROOT / "docs").rglob("*.md")) - reached == set()


def serve_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, arguments) of every `fastdeploy-sd serve` in a block of code, with the demo as its model."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^ *fastdeploy-sd serve (.*)$", text, re.MULTILINE):
            words = shlex.split(line, comments=True)
            position = words.index("--model") + 1 if "--model" in words else 0
            words[position] = "demo"
            yield page.name, words


COMMANDS = list(serve_commands())


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize(("page", "arguments"), COMMANDS)
def test_commands_to_serve_are_accepted(page: str, arguments: list[str]) -> None:
    load_config(arguments)


def test_the_refusal_of_a_decode_node_reads_as_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "unsupported.md").read_text(encoding="utf-8")
    shown = re.search(r"^\$ fastdeploy-sd (serve .*)\n((?:.+\n)+?)```", page, re.MULTILINE)
    assert shown is not None
    assert main(shlex.split(shown[1])) == 2
    assert capsys.readouterr().err == shown[2]
