"""What the fuzzers of a server share: the server, what is watched while they run, and the report.

A fuzzer adds to a Report what it sent and what came back. Meanwhile a Watch asks /health again and again, which
measures how long the server stands still for others, and repeats one stream, whose events must be those of the
undisturbed server. Both use threads of their own, so that a fuzzer may block.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.server_process import running_server

# Everything about it is fixed, so its events are too, with any other requests; drafts would change their number.
REFERENCE = {"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0.8, "seed": 7, "ignore_eos": True,
             "stream": True, "return_token_ids": True, "request_id": "reference",
             "speculation": {"enabled": False}}  # fmt: skip
HEALTH_PERIOD_S = 0.02
ANSWER_TIMEOUT_S = 120
SETTLE_S = 60
MAX_FINDINGS = 50


@dataclass
class Report:
    """What a run saw.

    Attributes:
        statuses: how many answers had each HTTP status; "closed" = the server closed without one, where it may.
        findings: what must not happen, each with how to repeat it.
        worst_stall_s: the longest wait for /health.
        num_reference_runs: how often the undisturbed stream was repeated.
    """

    statuses: Counter[int | str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    worst_stall_s: float = 0.0
    num_reference_runs: int = 0

    def add_finding(self, text: str) -> None:
        """Keep the first few; a broken server would fill the memory."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)

    def verify_stall(self, max_stall_ms: float | None) -> None:
        """Make a stall beyond the limit a finding."""
        if max_stall_ms is not None and self.worst_stall_s * 1000 > max_stall_ms:
            self.add_finding(f"/health waited {self.worst_stall_s * 1000:.0f} ms, at most {max_stall_ms:g} are allowed")

    def __str__(self) -> str:
        counts = ", ".join(f"{n} x {status}" for status, n in sorted(self.statuses.items(), key=str))
        lines = [
            f"{sum(self.statuses.values())} sent: {counts}",
            f"longest wait for /health {self.worst_stall_s * 1000:.0f} ms; "
            f"{self.num_reference_runs} reference streams; {len(self.findings)} findings",
        ]
        return "\n".join([*lines, *self.findings])


class Watch:
    """Watches a server while the block runs, and that it is whole afterwards.

    Args:
        url: of the server.
        report: gets the findings.
    """

    def __init__(self, url: str, report: Report) -> None:
        self._url = url
        self._report = report
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._probe), threading.Thread(target=self._repeat)]
        self._expected: list[Any] = []

    def __enter__(self) -> Watch:
        with client_of(self._url) as client:
            self._expected = reference_events(client)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(httpx.HTTPError):
            self._verify_idle()
            return
        self._report.add_finding("the server is gone")

    def _probe(self) -> None:
        with client_of(self._url) as client:
            while not self._stop.wait(HEALTH_PERIOD_S):
                begin = time.monotonic()
                try:
                    status = client.get("/health").status_code
                except httpx.HTTPError as error:
                    self._report.add_finding(f"/health: {error!r}")
                    continue
                self._report.worst_stall_s = max(self._report.worst_stall_s, time.monotonic() - begin)
                if status != httpx.codes.OK:
                    self._report.add_finding(f"/health: {status}")

    def _repeat(self) -> None:
        with client_of(self._url) as client:
            while not self._stop.wait(HEALTH_PERIOD_S):
                try:
                    events = reference_events(client)
                except httpx.HTTPError as error:
                    self._report.add_finding(f"the reference stream: {error!r}")
                    continue
                self._report.num_reference_runs += 1
                if events != self._expected:
                    self._report.add_finding(f"the reference stream differs: {events} instead of {self._expected}")

    def _verify_idle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        with client_of(self._url) as client:
            while True:
                load = client.get("/load").raise_for_status().json()
                if load["num_requests_running"] == load["num_requests_waiting"] == 0:
                    break
                if time.monotonic() > deadline:
                    self._report.add_finding(f"requests are left behind: {load}")
                    return
        if load["num_free_blocks"] + load["num_cached_blocks"] != load["num_blocks"]:
            self._report.add_finding(f"KV blocks are left behind: {load}")


def client_of(url: str) -> httpx.Client:
    """Return a client of a server, to be closed."""
    return httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False)


def reference_events(client: httpx.Client) -> list[Any]:
    """Return the events of the reference stream, without the time.

    A full queue is no finding: the stream is tried again until it is taken.

    Raises:
        httpx.HTTPError: no answer, or an error.
    """
    while (response := client.post("/v1/completions", json=REFERENCE)).status_code == httpx.codes.TOO_MANY_REQUESTS:
        time.sleep(HEALTH_PERIOD_S)
    lines = [line.removeprefix("data: ") for line in response.raise_for_status().text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) | {"created": None} for line in lines]


@contextlib.contextmanager
def server_at(url: str | None, *options: str) -> Iterator[str]:
    """Give the url of a server: the given one, or of one started for the block on the demo model."""
    if url is not None:
        yield url
        return
    with running_server("--model", "demo", "--num-threads", "1", *options) as server:
        yield server.url
        assert server.stop() == 0, "".join(server.log)


def argument_parser(description: str, count: int) -> argparse.ArgumentParser:
    """Return the options that every fuzzer has; `count` is how many bodies it sends unless told otherwise."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="of a running server; without it one is started on the demo model")
    parser.add_argument("--seed", type=int, default=0, help="of what is sent")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to repeat a finding")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--forever", action="store_true", help="go on with the next seed until a finding")
    parser.add_argument("--max-stall-ms", type=float, help="make a longer wait for /health a finding")
    return parser
