"""Loads the peers of each weight size, measures every metric and writes a record for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.command import Progress
from benchmarks.peers import launch
from benchmarks.peers.catalogue import IN_PROCESS, PEERS, PEERS_DIR, Plan, model_path
from benchmarks.peers.in_process import CALL_TIMEOUT_S, InProcess
from benchmarks.peers.machine import Machine, state_line
from benchmarks.peers.over_http import Drafter, Server, measure_http, measure_speculation
from benchmarks.peers.process import PeerError, Worker
from benchmarks.peers.protocol import Settings
from benchmarks.peers.results import Case, Group
from benchmarks.record import revision
from fastdeploy_sd.errors import ConfigError

_SERVER_MAX_LEN = 1024
LOGS = PEERS_DIR / "logs"


@dataclass(frozen=True, slots=True)
class Scope:
    """What is compared.

    Attributes:
        peers, bits, metrics: by name.
        threads: of computation, the same for all.
        kv_cache_dtype: of our own server.
        output: folder of the records; a metric that has a whole one of the same scope and revision is not measured
            again.
    """

    peers: Sequence[str]
    bits: Sequence[str]
    metrics: Sequence[str]
    threads: int
    kv_cache_dtype: str
    plan: Plan
    output: Path

    def settings(self) -> dict[str, Any]:
        """As in a record: what decides whether a record still answers the question."""
        values = {
            "peers": list(self.peers),
            "threads": self.threads,
            "kv_cache_dtype": self.kv_cache_dtype,
            "plan": asdict(self.plan),
        }
        settings: dict[str, Any] = json.loads(json.dumps(values))
        return settings

    def engine_settings(self, max_seqs: int, max_len: int) -> Settings:
        """What every worker and server is loaded with."""
        return Settings(threads=self.threads, max_seqs=max_seqs, max_len=max_len, kv_cache_dtype=self.kv_cache_dtype)


class Comparison:
    """One run over everything in scope.

    Raises:
        ConfigError: a peer is not set up.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        for bits in scope.bits:
            for peer in self._peers(bits):
                launch.verify_ready(peer, bits)
        self._machine = Machine(scope.threads)
        self._revision = revision()
        self.todo = [
            (bits, metric) for bits in scope.bits for metric in scope.metrics if not self._is_done(metric, bits)
        ]
        num_rounds = sum(scope.plan.num_rounds(metric) for _, metric in self.todo)
        self._progress = Progress(max(1, num_rounds), "peers")

    def run(self) -> None:
        """Measure what has no whole record of this revision yet."""
        for bits in self._scope.bits:
            metrics = [metric for todo, metric in self.todo if todo == bits]
            in_process = [metric for metric in metrics if metric in IN_PROCESS]
            if in_process:
                self._with_workers(bits, in_process)
            if "http" in metrics:
                self._with_servers(bits)
            if "speculation" in metrics:
                self._with_drafters(bits)

    def _peers(self, bits: str) -> list[str]:
        return [peer for peer in self._scope.peers if bits in PEERS[peer].formats]

    def _with_workers(self, bits: str, metrics: Sequence[str]) -> None:
        plan = self._scope.plan
        groups = [self._group(metric, bits) for metric in metrics]
        with ExitStack() as stack:
            workers = {}
            settings = self._scope.engine_settings(max(plan.batches), plan.max_len)
            for peer in self._peers(bits):
                info, worker = self._load(stack, peer, bits, settings)
                for group in groups:
                    group.peers[peer] = info
                if worker is not None:
                    workers[peer] = worker
            for group in groups:
                runner = InProcess(workers, plan, self._on_round(group))
                self._finish(group, runner.measure(group.metric))

    def _with_servers(self, bits: str) -> None:
        plan, group = self._scope.plan, self._group("http", bits)
        settings = self._scope.engine_settings(max(plan.concurrency), _SERVER_MAX_LEN)
        with ExitStack() as stack:
            servers = {}
            for peer in self._peers(bits):
                if peer in group.peers:  # with the reason why it has no place there
                    continue
                group.peers[peer], server = self._serve(stack, peer, bits, settings)
                if server is not None:
                    servers[peer] = server
            self._finish(group, measure_http(servers, plan, self._on_round(group)))

    def _with_drafters(self, bits: str) -> None:
        plan, group = self._scope.plan, self._group("speculation", bits)
        settings = self._scope.engine_settings(1, _SERVER_MAX_LEN)
        with ExitStack() as stack:
            drafters: list[Drafter] = []
            for peer in self._peers(bits):
                drafters += self._drafters(stack, peer, group, settings)
            self._finish(group, measure_speculation(drafters, plan, self._on_round(group)))

    def _drafters(self, stack: ExitStack, peer: str, group: Group, settings: Settings) -> list[Drafter]:
        """Every way of drafting of one peer; those that do not start appear as failed cases."""
        drafting = dict(islice(PEERS[peer].drafting.items(), self._scope.plan.max_drafters))
        if not PEERS[peer].has_server:
            group.peers[peer], worker = self._load(stack, peer, group.bits, settings)
            return [] if worker is None else [Drafter(peer, name, worker, option) for name, option in drafting.items()]
        drafters = []
        for name in drafting:
            group.peers[peer], server = self._serve(stack, peer, group.bits, settings, name)
            if server is None:
                group.cases.append(Case(name, peer, 1, failed=group.peers[peer]["failed"]))
            else:
                drafters.append(Drafter(peer, name, server, {}))
        return drafters

    def _load(self, stack: ExitStack, peer: str, bits: str, settings: Settings) -> tuple[dict[str, Any], Worker | None]:
        worker = Worker(launch.worker(peer, settings["threads"]), LOGS / f"{peer}-{bits}-worker.log")
        stack.callback(worker.close)
        fmt = PEERS[peer].formats[bits]
        try:
            loaded = worker.call("load", CALL_TIMEOUT_S, model=str(model_path(peer, fmt)), fmt=fmt, settings=settings)
        except PeerError as error:
            return _info(peer, bits, failed=error.message), None
        worker.pause()
        return _info(peer, bits) | loaded, worker

    def _serve(
        self, stack: ExitStack, peer: str, bits: str, settings: Settings, drafter: str | None = None
    ) -> tuple[dict[str, Any], Server | None]:
        arguments = [] if drafter is None else PEERS[peer].drafting[drafter]
        # A peer's drafters run at the same time, each with a log of its own.
        name = "-".join([peer, bits, "server", *(drafter or "").replace(",", "").split()])
        server = Server(lambda port: launch.server(peer, bits, port, settings, arguments), LOGS / f"{name}.log")
        stack.callback(server.close)
        try:
            server.wait()
        except PeerError as error:
            return _info(peer, bits, failed=error.message), None
        server.pause()
        return _info(peer, bits), server

    def _group(self, metric: str, bits: str) -> Group:
        return Group(
            metric=metric,
            bits=bits,
            git_sha=self._revision,
            settings=self._scope.settings(),
            machine=self._machine.describe(),
            peers={
                peer: _info(peer, bits, failed=lack)
                for peer in self._scope.peers
                if (lack := _lack(peer, metric, bits)) is not None
            },
        )

    def _on_round(self, group: Group) -> Callable[[], None]:
        def measure() -> None:
            group.rounds.append(self._machine.measure())
            self._progress.advance(f"{group.file_name}: {state_line(group.rounds[-1])}")

        return measure

    def _finish(self, group: Group, cases: Sequence[Case]) -> None:
        group.cases += cases
        group.save(self._scope.output)

    def _is_done(self, metric: str, bits: str) -> bool:
        """Whether there is a record of this scope and revision in which no peer has failed."""
        path = self._scope.output / f"{metric}-{bits}.json"
        try:
            group = Group.load(path) if path.exists() else None
        except ConfigError:
            return False  # of an older version: measured again
        if group is None or group.settings != self._scope.settings() or group.git_sha != self._revision:
            return False
        has_failed = any(info["failed"] != _lack(peer, metric, bits) for peer, info in group.peers.items())
        return not has_failed and all(case.failed is None for case in group.cases)


def _lack(peer: str, metric: str, bits: str) -> str | None:
    """Why a peer can never have figures in a metric, which is no failure."""
    if bits not in PEERS[peer].formats:
        return f"it runs in {', '.join(PEERS[peer].formats)} only here"
    if metric == "http" and not PEERS[peer].has_server:
        return "it has no server with OpenAI's API here"
    return None


def _info(peer: str, bits: str, failed: str | None = None) -> dict[str, Any]:
    """What a record says about a peer; a worker adds to it what it tells when it has loaded."""
    return {"format": PEERS[peer].formats.get(bits), "versions": {}, "kv_type": None, "notes": "", "failed": failed}
