"""Links of the documentation lead somewhere, and its commands are accepted or answered as it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.config import load_configs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```", re.DOTALL)
# A file of the repository in backticks; without a folder it is named relative to what was named before.
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|cc|cu|h|sh))`")
FOLDERS = (".", "fastdeploy_sd", "custom_ops/cpu/kernels", "custom_ops/cuda")
PLAIN = [*(ROOT / name for name in ("README.md", "CHANGELOG.md")), *sorted((ROOT / "docs").rglob("*.md"))]
UNCLEAR = re.compile(
    r"\b(?:dear|hope[sd]?|hoping|belief|believe[sd]?|lessons?|made_up|company|patience|goodbye|courier|wish(?:es)?"
    r"|whoever|nobody|somebody|anybody|everybody|beside|behind(?! (?:a|the) proxy))\b",
    re.IGNORECASE,
)
# These quote the words: the lists of this test, and a text whose digest is published.
QUOTING = {Path(__file__).resolve(), ROOT / "tests" / "ops" / "test_packing.py"}
SOURCES = [
    path
    for folder in ("fastdeploy_sd", "custom_ops", "benchmarks", "scripts", "tests")
    for kind in ("*.py", "*.h", "*.cc", "*.cu", "*.sh")
    for path in sorted((ROOT / folder).rglob(kind))
    if path not in QUOTING
]
MAX_LINE = 120  # but for rows of tables
IN_SOURCES = re.compile(
    r"\b(?:dear|hope[ds]?|belie[fv]\w*|lessons?|made_up|company|nobody|somebody|whoever|everybody|patience)\b",
    re.IGNORECASE,
)


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


def places(paths: Iterable[Path], words: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {word[0]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for word in words.finditer(line)
    ]


def test_words_that_hide_the_meaning_do_not_come_back() -> None:
    """Standard terms are in docs/glossary.md. "Behind a proxy" is one of them."""
    assert places(PLAIN, UNCLEAR) == []


def test_words_that_hide_the_meaning_do_not_come_back_to_the_code() -> None:
    assert {path.suffix for path in SOURCES} == {".py", ".h", ".cc", ".cu", ".sh"}
    assert places(SOURCES, IN_SOURCES) == []


def test_lines_of_text_are_short() -> None:
    for page in PLAIN:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        long = [line for line in text.splitlines() if len(line) > MAX_LINE and not line.startswith("|")]
        assert not long, page.relative_to(ROOT)


def test_files_that_pages_name_exist() -> None:
    missing = {
        f"{page.name}: {name}"
        for page in PAGES
        for name in PATH.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if not any((ROOT / folder / name).exists() for folder in FOLDERS)
    }
    assert missing == set()


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
            words = [re.sub(r"^(\w+)=.*", r"\1=demo", word) for word in shlex.split(line, comments=True)]
            if "--model" in words or not words[0].startswith("--"):
                words[words.index("--model") + 1 if "--model" in words else 0] = "demo"
            yield page.name, words


COMMANDS = list(serve_commands())


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize(("page", "arguments"), COMMANDS)
def test_commands_to_serve_are_accepted(page: str, arguments: list[str], tmp_path: Path) -> None:
    """Files of options are those that the page shows, or ours."""
    text = next(path for path in PAGES if path.name == page).read_text(encoding="utf-8")
    for name, content in re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content, encoding="utf-8")
        arguments = [str(tmp_path / name) if word == name else word for word in arguments]
    assert load_configs(arguments)


def test_the_refusal_of_a_decode_node_reads_as_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "unsupported.md").read_text(encoding="utf-8")
    shown = re.search(r"^\$ fastdeploy-sd (serve .*)\n((?:.+\n)+?)```", page, re.MULTILINE)
    assert shown is not None
    assert main(shlex.split(shown[1])) == 2
    assert capsys.readouterr().err == shown[2]
