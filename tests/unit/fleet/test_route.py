"""Routes: who may write one, for what, and for how long."""

from __future__ import annotations

import base64
import time

import pytest

from fastdeploy_sd.errors import Forbidden
from fastdeploy_sd.fleet import route as r
from fastdeploy_sd.fleet.signing import sign
from fastdeploy_sd.types import KvSource

KEY, BODY = b"k" * 32, b'{"prompt": "a"}'
PROGRESS = r.Progress("cmpl-1", 7, (1, 1 << 62), (r.ChoiceProgress((5, 6), True, 3), r.ChoiceProgress()))
SOURCE = KvSource("p1", "tcp://127.0.0.1:5000")


@pytest.mark.parametrize("progress", [None, PROGRESS])
@pytest.mark.parametrize("source", [None, SOURCE])
def test_a_route_says_what_it_was_made_of(progress: r.Progress | None, source: KvSource | None) -> None:
    header, content = r.make_route(KEY, "d1", BODY, progress, source)
    route = r.read_route(KEY, "d1", header)
    assert route.kv_source == source
    assert (route.num_body_bytes, route.num_bytes) == (len(BODY), len(content))
    assert r.read_content(route, content) == (BODY, progress)


def test_it_is_good_for_its_instance_and_its_body_only() -> None:
    header, content = r.make_route(KEY, "d1", BODY, PROGRESS, None)
    with pytest.raises(Forbidden, match="to this instance, got one to another"):
        r.read_route(KEY, "d2", header)
    with pytest.raises(Forbidden, match="signature of a router with this deployment's secret"):
        r.read_route(b"x" * 32, "d1", header)
    route = r.read_route(KEY, "d1", header)
    for other in (content + b"x", content[:-1], b"", BODY):
        with pytest.raises(Forbidden, match="to this body, got one to another"):
            r.read_content(route, other)


def test_every_changed_character_is_noticed() -> None:
    header, _ = r.make_route(KEY, "d1", BODY, None, SOURCE)
    for position in range(0, len(header), 7):
        changed = header[:position] + ("A" if header[position] != "A" else "B") + header[position + 1 :]
        with pytest.raises(Forbidden):
            r.read_route(KEY, "d1", changed)


def test_it_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = r.make_route(KEY, "d1", BODY, None, None)
    now = time.time()
    for seconds in (r.LIFE_S + 2, -2 * r.LIFE_S):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        with pytest.raises(Forbidden, match="the clocks differ, or it was kept"):
            r.read_route(KEY, "d1", header)
    monkeypatch.setattr(time, "time", lambda: now - r.LIFE_S / 2)  # another machine's clock
    r.read_route(KEY, "d1", header)


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"\x90", b"\xc1", b"not base64"])
def test_signed_nonsense_is_refused(content: bytes) -> None:
    text = content.decode("latin-1") if b" " in content else base64.urlsafe_b64encode(content).decode()
    with pytest.raises(Forbidden, match="expected a route of version 1"):
        r.read_route(KEY, "d1", f"{text}.{sign(KEY, 'route', text.encode())}")
