"""The body fuzzer's fixed budget, and that it finds what it is there to find."""

from __future__ import annotations

import httpx
import pytest

from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, CompletionBody, parse_body
from fastdeploy_sd.errors import BadRequest
from tests.fuzz.bodies import CHAT, BodyMaker, fault_of, run
from tests.fuzz.harness import server_at

pytestmark = pytest.mark.slow

COUNT = 500


@pytest.mark.long
def test_no_body_breaks_the_server() -> None:
    with server_at(None, "--kv-cache-memory-gb", "0.1") as url:
        report = run(url, seed=20, numbers=range(COUNT))
    print(report)
    assert not report.findings, report
    assert sum(report.statuses.values()) == COUNT
    assert report.statuses[200] > COUNT / 10, "bodies must reach the engine"
    assert report.num_reference_runs > 0


def test_a_body_depends_on_its_number_only() -> None:
    assert BodyMaker(1, 7).make() == BodyMaker(1, 7).make()
    assert len({BodyMaker(1, i).make().content for i in range(100)}) > 90


def test_bodies_are_right_and_wrong() -> None:
    """Each way of making them has both, or what it is for."""
    taken: dict[str, list[bool]] = {}
    for number in range(1000):
        sent = BodyMaker(3, number).make()
        body_type = ChatCompletionBody if sent.path == CHAT else CompletionBody
        try:
            parse_body(body_type, sent.content)
        except BadRequest:
            taken.setdefault(sent.kind, []).append(False)
        else:
            taken.setdefault(sent.kind, []).append(True)
    assert len(taken) == 9
    for kind in ("allowed", "edges", "confused", "product", "conversation", "formed"):
        assert set(taken[kind]) == {True, False}, kind


@pytest.mark.parametrize(
    ("status", "headers", "text"),
    [
        (500, {}, "{}"),
        (400, {}, "Internal Server Error"),
        (400, {}, '{"detail": "x"}'),
        (200, {"content-type": "text/event-stream"}, 'data: {"choices": []}\n\n'),
        (200, {"content-type": "text/event-stream"}, 'data: {"error": {"type": "internal_error"}}\n\ndata: [DONE]\n\n'),
    ],
)
def test_a_wrong_answer_is_found(status: int, headers: dict[str, str], text: str) -> None:
    assert fault_of(
        httpx.Response(status, headers=headers, text=text)
        if not headers
        else httpx.Response(status, headers=headers, content=text.encode())
    )
