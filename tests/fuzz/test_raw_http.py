"""The fuzzer of raw HTTP: its fixed budget, and that it finds what it is there to find."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.harness import Report, Watch
from tests.fuzz.raw_http import SERVER_OPTIONS, Exchange, ExchangeMaker, faults_of, fuzz
from tests.server.toy_process import serving

pytestmark = pytest.mark.slow

_ERROR = b'{"error":{"message":"","type":"","param":null,"code":""}}'
RIGHT = b"HTTP/1.1 400 X\r\ncontent-length: %d\r\n\r\n" % len(_ERROR) + _ERROR


def test_an_exchange_depends_on_its_number_only() -> None:
    assert ExchangeMaker(1, 7).make() == ExchangeMaker(1, 7).make()
    assert {ExchangeMaker(1, i).make().kind for i in range(100)} == {
        "right", "damaged", "odd", "cut", "chunks", "opening"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("received", "methods", "fault"),
    [
        (RIGHT + RIGHT, ("GET", "GET"), ""),
        (RIGHT, ("GET", "GET"), "1 answers to 2 requests"),
        (RIGHT[:-20], None, "no HTTP"),
        (b"HTTP/1.1 400 X\r\ncontent-length: 3\r\n\r\nbad", None, "400 in another form"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 3\r\n\r\nbad", None, "500"),
        (b"garbage\r\n\r\n", None, "no HTTP"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 3\r\n\r\n", ("HEAD",), ""),
    ],
)
def test_a_wrong_answer_is_found(received: bytes, methods: tuple[str, ...] | None, fault: str) -> None:
    faults = faults_of(Exchange("", (), methods), received, is_closed=True)
    assert [f[: len(fault)] for f in faults] == ([fault] if fault else [])


def test_odd_bytes_do_no_harm(golden_dir: Path) -> None:
    report = Report()
    with serving(golden_dir, **SERVER_OPTIONS) as server:
        with Watch(server.url, report):
            asyncio.run(fuzz(server.url, 0, range(1000), report))
        log = server.stderr
    assert report.findings == [], report
    assert report.statuses["200"] > 100
    assert report.num_reference_runs > 0
    assert len(log.splitlines()) == 4, "only the four lines of the start"
