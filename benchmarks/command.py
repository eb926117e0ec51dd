"""The command line of every benchmark: options with their ranges, a progress bar, and a table or JSON as the result."""

from __future__ import annotations

import argparse
import json
import string
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fastdeploy_sd.errors import ConfigError, suggest

OUTPUT_DIR = Path("build", "bench")
_PROG = "python -m benchmarks"
_BAR_WIDTH = 30
T = TypeVar("T")


class Command(argparse.ArgumentParser):
    """The options of one command.

    Args:
        others: whose the remaining options are, e.g. "the engine's"; "" = the command takes no others.
    """

    def __init__(self, name: str, description: str, others: str = "") -> None:
        epilog = f"All other options are {others}." if others else None
        super().__init__(prog=f"{_PROG} {name}", allow_abbrev=False, description=description, epilog=epilog)
        self._takes_others = bool(others)
        self._least: dict[str, int] = {}
        self._known: dict[str, Collection[str]] = {}

    def number(self, name: str, default: int | Sequence[int] | None, text: str = "", *, least: int = 1) -> None:
        """Add an option for an integer of at least `least`, or for several ("1 8" or "1,8") where the default is."""
        if isinstance(default, Sequence):
            text = f"{text} (default: {' '.join(map(str, default))})".lstrip() if default else text
            option = self.add_argument(name, type=_numbers, nargs="+", default=default, metavar="N", help=text)
        else:
            text = text if default is None else f"{text} (default: {default})".lstrip()
            option = self.add_argument(name, type=int, default=default, metavar="N", help=text)
        self._least[option.dest] = least

    def some(self, name: str, known: Collection[str], text: str, default: Sequence[str] | None = None) -> None:
        """Add an option for some of the known names, each once, with spaces or commas between."""
        text = f"{text}; of {', '.join(known)}"
        option = self.add_argument(name, type=_words, nargs="+", default=default, metavar="NAME", help=text)
        self._known[option.dest] = known

    def folder(self, default: Path, text: str = "for the JSON records", name: str = "--output") -> None:
        """Add an option for a folder."""
        self.add_argument(name, type=Path, default=default, metavar="DIR", help=f"{text} (default: {default})")

    def json(self) -> None:
        """Add --json; `show` obeys it."""
        self.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options; `others` are the arguments that are not the command's own.

        Raises:
            ConfigError: a number is below its least, or a name is not known or given twice.
        """
        args, others = self.parse_known_args(argv)
        if others and not self._takes_others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        for name, given in vars(args).items():
            if isinstance(given, list):
                setattr(args, name, [value for part in given for value in (part if isinstance(part, list) else [part])])
        for name, least in self._least.items():
            given = getattr(args, name)
            for value in given if isinstance(given, Sequence) else [given]:
                if value is not None and value < least:
                    raise ConfigError(f"{name}: expected at least {least}, got {value}", param=name)
        for name, known in self._known.items():
            _verify_names(name, getattr(args, name) or (), known)
        args.others = others
        return args


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _verify_names(name: str, given: Sequence[str], known: Collection[str]) -> None:
    for value in given:
        if value not in known:
            near = suggest(value, known)
            raise ConfigError(f"{name}: expected some of {', '.join(known)}, got {value!r}{near}", param=name)
    if len(set(given)) < len(given):
        raise ConfigError(f"{name}: expected each once, got {', '.join(given)}", param=name)


def with_default(options: Sequence[str], name: str, value: object) -> list[str]:
    """Return options of others with this one, unless they have it."""
    has_it = any(option == name or option.startswith(f"{name}=") for option in options)
    return list(options) if has_it else [name, str(value), *options]


def show(args: argparse.Namespace, result: object, table: str) -> None:
    """Print the result, of JSON's types and dataclasses, or its table."""
    print(json.dumps(result, indent=1, default=asdict) if args.json else table)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a cell that is None is "-"."""
    lines = [head, *(["-" if cell is None else cell for cell in row] for row in rows)]
    first, *others = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    return "\n".join([first, "|" + "---|" * len(head), *others])


def table_of(items: Iterable[T], columns: Mapping[str, str | Callable[[T], object]]) -> str:
    """Return a Markdown table of a row per item.

    Args:
        columns: heading -> what is in the cell: a format of the item, e.g. "{0.us:.1f}", or a function of it. A value
            that is None is "-".
    """
    return markdown_table(list(columns), ([_cell(item, column) for column in columns.values()] for item in items))


class _Format(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


def _cell(item: T, column: str | Callable[[T], object]) -> object:
    return _Format().format(column, item) if isinstance(column, str) else column(item)


class Progress:
    """Counts up to `total`. Redraws one line on a terminal; elsewhere, e.g. in a log, at most eleven lines are written.

    Args:
        total: units of work, >= 1.
        label: what is being done.
        stream: where to draw.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self._total = total
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._num_done = 0
        self._show()

    def advance(self, stage: str = "") -> None:
        """Count one unit; `stage` says what comes next."""
        self._num_done += 1
        self._show(stage)

    def _show(self, stage: str = "") -> None:
        filled = _BAR_WIDTH * self._num_done // self._total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        line = f"{self._label} [{bar}] {self._num_done}/{self._total} {stage}".rstrip()
        if not self._stream.isatty():
            if 10 * self._num_done // self._total != 10 * (self._num_done - 1) // self._total:
                print(line, file=self._stream, flush=True)
            return
        end = "\n" if self._num_done == self._total else ""
        print(f"\r\x1b[2K{line}", end=end, file=self._stream, flush=True)
