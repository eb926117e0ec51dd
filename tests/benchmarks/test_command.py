"""One entry: what it refuses in the same words for every command, and the tables they print."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.__main__ import COMMANDS, main
from benchmarks.command import Command, Progress, markdown_table, show, table_of


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("offlin", "command: expected one of offline, .* or a YAML file, got 'offlin' (did you mean 'offline'?)"),
        ("host --batch 4 0", "batch: expected at least 1, got 0"),
        ("host --methods mtp --steps 1", "speculative_config.method: expected a method that needs no model"),
        ("http --rate 0", "rate: expected a positive number, got 0.0"),
        ("http --rate 1 --concurrency 2", "concurrency: expected without --rate, got both"),
        ("http --num-requests 0", "num_requests: expected at least 1, got 0"),
        ("http --seed -1", "seed: expected at least 0, got -1"),
        ("kernels --shapes 1024", "shapes: expected KxN such as 1024x4096, got '1024'"),
        ("kernels --shapes 0x64", "shapes: expected KxN such as 1024x4096, got '0x64'"),
        ("compare --other . --rows 2 4", "rows: expected 1 among them, got [2, 4]"),
        ("kernels --rows 4,0 1", "rows: expected at least 1, got 0"),
        ("offline --output-len 1", "output_len: expected at least 2, got 1"),
        ("peers rum", "peers: expected one of setup, run, report, gguf, got 'rum' (did you mean 'run'?)"),
        ("peers run --threads 0", "threads: expected at least 1, got 0"),
        ("peers report --output nowhere", "records: expected *.json files in nowhere, got none"),
        ("speculation --workloads code-edti", "workloads: expected some of code-edit, completion, free-text, repeated"),
        ("speculation --batch-sizes 0", "batch_sizes: expected at least 1, got 0"),
        ("speculation --output-len 1", "output_len: expected at least 8, got 1"),
        (
            "speculation --methods naive",
            "methods: expected some of ngram, suffix, mtp, auto, auto-mtp, mtp-ngram, mtp-suffix, got 'naiv",
        ),
        ("speculation --methods mpt", "methods: expected some of .*, got 'mpt' (did you mean 'mtp'?)"),
        ("speculation --methods mtp,mtp", "methods: expected each once, got mtp, mtp"),
        ("speculation --config a.yaml --model demo", "model: expected without --config, whose files say it, got both"),
        ("speculation --config a.yaml --methods mtp", "methods: expected without --config, whose files say it, got bo"),
        ("speculation --quantisation wint4", "quantisation: unknown option"),
    ],
)
def test_wrong_options(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    first, _, last = message.rpartition(".*")
    error = capsys.readouterr().err
    assert f"error: {first}" in error
    assert last in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse's way to end
        main([name, "--help"])
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    share: float | None
    times: dict[str, float]


ITEMS = [Item("a", 0.5, {"p50": 1.234}), Item("b", None, {"p50": 2.0})]


def test_a_column_is_a_format_or_a_function_and_what_is_not_there_a_dash() -> None:
    columns: dict[str, str | Callable[[Item], object]] = {
        "Name": "{0.name}",
        "Share": "{0.share:.0%}",
        "ms": "{0.times[p50]:.1f}",
        "x": lambda _: None,
    }
    assert table_of(ITEMS, columns).splitlines() == [
        "| Name | Share | ms | x |",
        "|---|---|---|---|",
        "| a | 50% | 1.2 | - |",
        "| b | - | 2.0 | - |",
    ]
    assert markdown_table(["A"], []) == "| A |\n|---|"


def test_a_result_is_shown_as_a_table_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("x", "")
    command.json()
    show(command.read([]), ITEMS, "the table")
    assert capsys.readouterr().out == "the table\n"
    show(command.read(["--json"]), {"items": ITEMS}, "the table")
    assert json.loads(capsys.readouterr().out)["items"][1] == {"name": "b", "share": None, "times": {"p50": 2.0}}


def test_options_of_others_are_kept_or_refused() -> None:
    assert Command("x", "", "the engine's").read(["--model", "m"]).others == ["--model", "m"]
    with pytest.raises(SystemExit):
        Command("x", "").read(["--model", "m"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_line_is_redrawn() -> None:
    stream = Terminal()
    progress = Progress(2, "work", stream)
    progress.advance("second")
    progress.advance()
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().split("\r\x1b[2K")[1:] == [
        "work [" + "." * 30 + "] 0/2",
        "work [" + "#" * 15 + "." * 15 + "] 1/2 second",
        "work [" + "#" * 30 + "] 2/2\n",
    ]


@pytest.mark.parametrize(("total", "num_lines"), [(1, 2), (4, 5), (200, 11)])
def test_log_stays_short(total: int, num_lines: int) -> None:
    stream = io.StringIO()
    progress = Progress(total, "work", stream)
    for _ in range(total):
        progress.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == num_lines
    assert lines[-1].endswith(f"{total}/{total}")
