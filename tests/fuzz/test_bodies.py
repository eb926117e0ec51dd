"""The body fuzzer finds what it is there to find."""

from __future__ import annotations

import httpx
import pytest

from tests.fuzz.bodies import BodyMaker, fault_of


def test_a_body_depends_on_its_number_only() -> None:
    assert BodyMaker(1, 7).make() == BodyMaker(1, 7).make()
    assert len({BodyMaker(1, i).make().content for i in range(100)}) > 90


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
