"""What a router and its servers accept from each other: secrets, repeated messages, nonsense, keys of clients."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.wire.protocol import mac
from fastdeploy_sd.wire.secret import derive_key
from tests.doubles.ports import free_port
from tests.server.router_process import Fleet, Router, kill, wait_until
from tests.server.toy_process import WAIT_S, complete
from tests.unit.cluster.router.registrations import SAID

pytestmark = pytest.mark.slow

NONSENSE = [b"", b"\x80\x04N.", b"\xff" * 1000, b"{}", b"\xc1", b"\x91" * 10_000, b"x" * 70_000]


@pytest.fixture
def fleet(golden_dir: Path, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(golden_dir, tmp_path / "state") as fleet:
        yield fleet


def key_of(fleet: Fleet) -> bytes:
    """What registrations of this fleet are signed with."""
    return derive_key((fleet.state / "fastdeploy_sd" / "pd_secret").read_bytes(), "registration")


def post(router: Router, path: str, content: bytes) -> httpx.Response:
    return httpx.post(f"{router.url}{path}", content=content, timeout=WAIT_S)


def test_a_server_with_another_secret_is_not_taken(fleet: Fleet, tmp_path: Path) -> None:
    router = fleet.router()
    stranger = fleet.server(router, state=tmp_path / "another")
    friend = fleet.server(router)
    stranger.wait_for_line("403: signature: expected one made with this deployment's secret")
    router.wait_for_instances(friend)
    assert router.metric('fastdeploy_sd:router_registrations_total{outcome="wrong_secret"}') >= 1
    assert complete(stranger.url).status_code == 200  # it serves by itself


def test_a_secret_may_be_given_to_all(fleet: Fleet, tmp_path: Path) -> None:
    router = fleet.router(pd_secret="correct horse battery")
    friend = fleet.server(router, state=tmp_path / "another", pd_secret="correct horse battery")
    stranger = fleet.server(router, pd_secret="wrong horse battery")
    stranger.wait_for_line("made with this deployment's secret")
    router.wait_for_instances(friend)
    assert complete(router.url).status_code == 200
    assert not (tmp_path / "another").exists()


def test_what_was_said_before_is_not_believed(fleet: Fleet) -> None:
    port = free_port()
    router = fleet.router(port=port)
    challenge = router.get(m.CHALLENGE).json()["challenge"]
    codec = m.codec_for(key_of(fleet))
    registration = (m.REGISTER, codec.encode(m.REGISTER, replace(SAID, challenge=challenge)))
    session = post(router, *registration).json()["session"]
    beat = m.Heartbeat(session, 1, InstanceLoad(), m.Clock.now())
    heartbeat = (m.HEARTBEAT, codec.encode(m.HEARTBEAT, beat))
    assert [post(router, *heartbeat).status_code for _ in range(3)] == [200, 403, 403]
    assert post(router, *registration).status_code == 403
    last = m.Heartbeat(session, 2, InstanceLoad(), m.Clock.now())
    assert post(router, m.DEREGISTER, codec.encode(m.DEREGISTER, last)).status_code == 200
    assert [post(router, *message).status_code for message in (registration, heartbeat)] == [403, 404]
    assert router.instances() == []
    kill(router)
    router.wait()
    again = fleet.router(port=port)
    again.get("/instances")
    assert [post(again, *message).status_code for message in (registration, heartbeat)] == [403, 404]
    assert again.instances() == []


def test_nonsense_at_every_route_is_refused_and_harms_nothing(fleet: Fleet) -> None:
    router = fleet.router()
    server = fleet.server(router)
    router.wait_for_instances(server)
    key = key_of(fleet)
    for path in (m.REGISTER, m.HEARTBEAT, m.DEREGISTER):
        for content in NONSENSE:
            answers = [post(router, path, content), post(router, path, mac(key, f"router\0{path}", content) + content)]
            assert {answer.status_code for answer in answers} <= {400, 403, 413}
            assert all(answer.json()["error"]["message"] for answer in answers)
        assert router.get(path).status_code == 405
    host, port = router.address.split(":")
    for content in NONSENSE:
        with socket.create_connection((host, int(port)), WAIT_S) as raw:
            raw.sendall(content + b"\r\n\r\n")
    router.wait_for_instances(server)
    assert complete(router.url).status_code == 200
    assert "Traceback" not in router.stderr


def test_it_listens_where_it_was_told_only(fleet: Fleet) -> None:
    router = fleet.router()
    router.get("/version")
    inodes = {link.readlink().name for link in Path(f"/proc/{router.process.pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    assert listening == [f"0100007F:{int(router.address.rpartition(':')[2]):04X}"]


def _is_healthy(router: Router) -> bool:
    return router.get("/health").is_success


def test_keys_of_clients_are_passed_on_or_replaced(fleet: Fleet) -> None:
    passing = fleet.router()
    asking = fleet.router(api_key="of-the-router", instance_api_key="of-servers")
    fleet.server(passing, asking, api_key="of-servers")
    for router in (passing, asking):
        headers = {"Authorization": "Bearer of-the-router"}
        wait_until(functools.partial(_is_healthy, router))
        body = {"model": "toy", "prompt": [5], "max_tokens": 1}
        statuses = [
            httpx.post(f"{router.url}/v1/completions", json=body, headers=given, timeout=WAIT_S).status_code
            for given in ({}, headers, {"Authorization": "Bearer of-servers"})
        ]
        assert statuses == ([401, 401, 200] if router is passing else [401, 200, 401])
