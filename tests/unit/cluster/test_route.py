"""Routes: who may write one, for what, and for how long."""

from __future__ import annotations

import base64
import re

import pytest

from fastdeploy_sd.cluster import route as r
from fastdeploy_sd.errors import Forbidden
from fastdeploy_sd.types import KvSource
from fastdeploy_sd.wire.protocol import mac

KEY, BODY = b"k" * 32, b'{"prompt": "a"}'
PROGRESS = r.Progress("cmpl-1", 7, (1, 1 << 62), (r.ChoiceProgress((5, 6), True, 3), r.ChoiceProgress()))
SOURCE = KvSource("p1", "tcp://127.0.0.1:5000")
NOW = 5000.0


def reader(instance_id: str = "d1", key: bytes = KEY, now: float = NOW) -> r.RouteReader:
    return r.RouteReader(key, [instance_id], lambda: now)


@pytest.mark.parametrize("progress", [None, PROGRESS])
@pytest.mark.parametrize("source", [None, SOURCE])
def test_a_route_says_what_it_was_made_of(progress: r.Progress | None, source: KvSource | None) -> None:
    header, content = r.make_route(KEY, r.Recipient("d1", NOW), BODY, progress, source, "key 1")
    route = reader().read(header)
    assert (route.kv_source, route.client) == (source, "key 1")
    assert (route.num_body_bytes, route.num_bytes) == (len(BODY), len(content))
    assert r.read_content(route, content) == (BODY, progress)


def test_it_is_good_for_its_instance_and_its_body_only() -> None:
    header, content = r.make_route(KEY, r.Recipient("d1", NOW), BODY, PROGRESS, None, "key 1")
    with pytest.raises(Forbidden, match="to this instance, got one to another"):
        reader("d2").read(header)
    with pytest.raises(Forbidden, match="signature of a router with this deployment's secret"):
        reader(key=b"x" * 32).read(header)
    route = reader().read(header)
    for other in (content + b"x", content[:-1], b"", BODY):
        with pytest.raises(Forbidden, match="to this body, got one to another"):
            r.read_content(route, other)


def test_it_names_an_engine_of_a_server_with_several() -> None:
    for ids, engines in ((["s"], [None]), (["s.0", "s.1"], [0, 1])):
        taking = r.RouteReader(KEY, ids, lambda: NOW)
        headers = [r.make_route(KEY, r.Recipient(name, NOW), BODY, None, None, "key 1")[0] for name in ids]
        assert [taking.engine_of(taking.read(header)) for header in headers] == engines
    header, _ = r.make_route(KEY, r.Recipient("s.2", NOW), BODY, None, None, "key 1")
    with pytest.raises(Forbidden, match="to this instance, got one to another"):
        taking.read(header)


def test_every_changed_character_is_noticed() -> None:
    header, _ = r.make_route(KEY, r.Recipient("d1", NOW), BODY, None, SOURCE, "key 1")
    for position in range(0, len(header), 7):
        changed = header[:position] + ("A" if header[position] != "A" else "B") + header[position + 1 :]
        with pytest.raises(Forbidden):
            reader().read(changed)


def test_it_ends_with_its_time_by_the_clock_of_its_instance(caplog: pytest.LogCaptureFixture) -> None:
    header, _ = r.make_route(KEY, r.Recipient("d1", NOW), BODY, None, None, "key 1")
    for seconds in (r.LIFE_S, -r.LIFE_S):
        text = f"a route that ends within 60 s of {NOW + seconds:.1f} s, got one that ends at 5060.0 s"
        with pytest.raises(Forbidden, match=re.escape(text)):
            reader(now=NOW + seconds).read(header)
    assert "this instance's monotonic clock is 4940.0 s" in caplog.text
    for seconds in (r.LIFE_S - 1, 1 - r.LIFE_S):
        reader(now=NOW + seconds).read(header)


def test_it_is_taken_once_as_long_as_it_would_be_good() -> None:
    now = NOW
    taking = r.RouteReader(KEY, ["d1"], lambda: now)
    headers = []
    for _ in range(5):
        headers.append(r.make_route(KEY, r.Recipient("d1", now), BODY, None, None, "key 1")[0])
        taking.read(headers[-1])
        now += 20
        for used in headers[-3:]:
            with pytest.raises(Forbidden, match=r"a new route, got one that was used before|a route that ends within"):
                taking.read(used)
    now += r.LIFE_S
    taking.read(r.make_route(KEY, r.Recipient("d1", now), BODY, None, None, "key 1")[0])
    assert len(taking._used) == 1  # what would be refused for its age is not remembered


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"\x90", b"\xc1", b"\x05"])
def test_signed_nonsense_is_refused(content: bytes) -> None:
    signed = mac(KEY, f"router\0{r.ROUTE_HEADER}", content) + content
    with pytest.raises(Forbidden, match="expected a route of version 6"):
        reader().read(base64.urlsafe_b64encode(signed).decode())


@pytest.mark.parametrize("header", ["", ".", "not base64", "x", "\xff"])
def test_what_is_no_frame_is_refused(header: str) -> None:
    with pytest.raises(Forbidden):
        reader().read(header)
