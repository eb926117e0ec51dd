"""The instances of a simulated deployment: their steps, heartbeats, transfers of KV, and what goes wrong with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from benchmarks.cluster.deployment import Deployment, EventQueue, Job, KvSend, Outcome, Seat
from benchmarks.cluster.engines import KvOrders, SimulatedEngine
from benchmarks.cluster.routing import SimulatedRouter
from benchmarks.cluster.workload import MAX_MODEL_LEN, OUTPUT_TOKEN
from fastdeploy_sd.cluster.membership import DECODE, MIXED, PREFILL, Member
from fastdeploy_sd.cluster.messages import HEARTBEAT_S
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import KvDescription, Request, RequestOutput

_SAMPLE_S = 1.0
_RECORD_S = 0.25  # between an instance's records in Redis, as in cluster/redis/consumer.py
_KV = KvDescription("CPU", "simulated", 16, "bfloat16", 1, 1, 1, (16, 16))
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Requests(Protocol):
    """What becomes of requests at engines."""

    def take(self, job: Job, output: RequestOutput) -> None:
        """An engine gave a request tokens, or ended it."""

    def fail(self, job: Job, *, is_refusal: bool) -> None:
        """A request is not at its engine any more; `is_refusal`: this had no room for it."""

    def note_fall(self, places: Sequence[str]) -> None:
        """An instance with these places has died or fallen silent."""


class Fleet:
    """All engines; `requests` is told of theirs."""

    def __init__(
        self,
        deployment: Deployment,
        events: EventQueue,
        routers: Sequence[SimulatedRouter],
        rng: random.Random,
        requests: Requests,
    ) -> None:
        self._d, self._events, self._routers, self._rng, self._requests = deployment, events, routers, rng, requests
        self._beat_s = _RECORD_S if deployment.uses_redis else HEARTBEAT_S
        self.outcome = Outcome()
        self.jobs: dict[str, Job] = {}
        self.samples = True
        self._seats: dict[str, Seat] = {}
        self._instances: list[list[Seat]] = []
        self._start_all()

    @property
    def most_tokens(self) -> int:
        """Of a request."""
        return next(iter(self._seats.values())).engine.engine.model_info.max_request_tokens

    def seat_of(self, instance_id: str) -> Seat:
        return self._seats[instance_id.partition("#")[0]]

    def submit(self, seat: Seat, job: Job) -> None:
        """Give an engine a request, or what is left of it."""
        assert job.placement is not None, "it was given to one"
        source = job.placement.source
        done = np.full(job.num_done, OUTPUT_TOKEN, np.int32)
        kv_source = None if source is None else source.kv_source
        request = Request(job.name, job.prompt, _GREEDY, job.num_wanted, 0, output_token_ids=done, kv_source=kv_source)
        seat.engine.submit(request)
        self._wake(seat)

    def is_up(self, place: str) -> bool:
        return self._seats[place].is_up

    def abort(self, seat: Seat, job: Job) -> None:
        """Its client is gone."""
        seat.engine.engine.abort([job.name])

    def end(self) -> Outcome:
        for seat in self._seats.values():
            self._count(seat)
        self.outcome.end_s = self._events.now
        return self.outcome

    def _start_all(self) -> None:
        d, faults = self._d, self._d.faults
        unlucky = self._rng.sample(range(d.num_instances), min(d.num_instances, faults.num_instances))
        slow = set(unlucky[: faults.num_slow])
        for i in range(d.num_instances):
            role = MIXED if not d.num_prefill else PREFILL if i < d.num_prefill else DECODE
            slowdown = faults.slow_factor if i in slow else 1.0
            self._instances.append([self._new_seat(f"{i}.{e}", role, slowdown) for e in range(d.num_engines)])
        num_falls = faults.num_deaths + faults.num_hangs
        for n, i in enumerate(unlucky[faults.num_slow :]):
            self._events.at((n + 1) / (num_falls + 1) * faults.span_s, self._fall, i, n >= faults.num_deaths)
        self._events.at(_SAMPLE_S, self._sample)

    def _new_seat(self, place: str, role: str, slowdown: float) -> Seat:
        seat = Seat(place, role, slowdown, self._d.shape.start(slowdown))
        self._seats[place] = seat
        self._start(seat)
        return seat

    def _start(self, seat: Seat) -> None:
        """Start an engine and have all routers know it."""
        if seat.role == DECODE:
            seat.orders = KvOrders(lambda *order: self._order(seat, *order))
        seat.engine = self._d.shape.start(seat.slowdown, seat.orders)
        seat.is_up, seat.is_hung, seat.num_starts = True, False, seat.num_starts + 1
        kv = None if seat.role == MIXED else _KV
        address = f"tcp://{seat.place}:1" if seat.role == PREFILL else ""
        member = Member(f"{seat.place}#{seat.num_starts}", seat.role, "simulated", MAX_MODEL_LEN, address, kv)
        for router in self._routers:
            router.register(seat.place, member, seat.engine.load)
        self._events.at(self._events.now + self._rng.random() * self._beat_s, self._beat, seat, seat.engine)

    def _beat(self, seat: Seat, engine: SimulatedEngine) -> None:
        if not seat.is_up or seat.engine is not engine:
            return
        seat.last_beat = self._events.now
        for router in self._routers:
            router.report(seat.place, engine.load)
        self._events.at(self._events.now + self._beat_s, self._beat, seat, engine)

    def _sample(self) -> None:
        loads = [seat.engine.load.share for seat in self._seats.values() if seat.is_up and seat.role != PREFILL]
        mean = sum(loads) / len(loads) if loads else 0.0
        if mean:
            self.outcome.imbalance.append(max(loads) / mean)
        if self.samples:
            self._events.at(self._events.now + _SAMPLE_S, self._sample)

    def _fall(self, instance: int, hangs: bool) -> None:
        """An instance dies, or stops without a word; either way it is started again some time later."""
        for seat in self._instances[instance]:
            self._count(seat)
            seat.is_up, seat.is_hung = False, hangs
            found_out = self._d.network_s
            if hangs:
                found_out = max(seat.last_beat + self._d.routing.lost_s - self._events.now, 0.0)
            self._events.at(self._events.now + found_out, self._break_all, seat, seat.engine)
            self._events.at(self._events.now + self._d.faults.restart_s, self._restart, seat)
        self._requests.note_fall([seat.place for seat in self._instances[instance]])

    def _restart(self, seat: Seat) -> None:
        self._break_all(seat, seat.engine)
        self._start(seat)

    def _break_all(self, seat: Seat, engine: SimulatedEngine) -> None:
        if seat.engine is not engine:
            return
        seat.is_hung = False
        for job in sorted(seat.jobs, key=lambda job: job.name):
            self._requests.fail(job, is_refusal=False)
        sends, seat.sends = seat.sends, {}
        for send in sends.values():
            self._arrive(send, None)

    def _count(self, seat: Seat) -> None:
        """Add what an engine has done to the outcome; each is counted once, as it ends."""
        if not seat.is_up:
            return
        stats, outcome = seat.engine.engine.stats(), self.outcome
        outcome.num_steps += seat.engine.num_steps
        outcome.num_rows += seat.engine.num_rows
        outcome.num_preemptions += stats.num_preemptions
        if seat.role != DECODE:
            outcome.num_query_tokens += stats.num_prefix_query_tokens
            outcome.num_hit_tokens += stats.num_prefix_hit_tokens

    def _wake(self, seat: Seat) -> None:
        if seat.is_up and not seat.engine.is_stepping and seat.engine.has_work:
            self._step(seat)

    def _step(self, seat: Seat) -> None:
        engine = seat.engine
        for request in engine.take_inbox():
            try:
                engine.engine.submit(request)
            except FdsdError:
                self._refuse(seat, request.request_id)
        outputs = engine.step()
        if not engine.engine.is_stalled:
            engine.is_stepping = True
            self._events.at(self._events.now + engine.executor.last_ms / 1e3, self._finish_step, seat, engine, outputs)

    def _refuse(self, seat: Seat, name: str) -> None:
        send, job = seat.sends.pop(name, None), self.jobs.get(name)
        if send is not None:
            self._arrive(send, None)
        elif job is not None:  # else its client is gone
            self._requests.fail(job, is_refusal=True)

    def _finish_step(self, seat: Seat, engine: SimulatedEngine, outputs: list[RequestOutput]) -> None:
        if not seat.is_up or seat.engine is not engine:
            return
        engine.is_stepping = False
        for output in outputs:
            send = seat.sends.pop(output.request_id, None)
            job = self.jobs.get(output.request_id)
            if send is not None:
                self._send(seat, send)
            elif job is not None:  # else its client is gone
                self._requests.take(job, output)
        if engine.has_work:
            self._step(seat)

    def _order(self, target: Seat, request: Request, num_tokens: int, num_cached: int) -> None:
        """A decode engine waits for a prompt's KV."""
        assert request.kv_source is not None, "else it would not wait"
        source = self.seat_of(request.kv_source.instance_id)
        send = KvSend(self.jobs[request.request_id], target, target.engine, num_tokens, num_cached)
        self._events.at(self._events.now + self._d.network_s, self._begin_send, source, send)

    def _begin_send(self, source: Seat, send: KvSend) -> None:
        job = send.job
        if not (source.is_up or source.is_hung):
            self._arrive(send, None)
        elif not job.ended:
            name = f"{job.name}/{job.num_moves}"
            source.sends[name] = send
            done = np.full(send.num_tokens - len(job.prompt), OUTPUT_TOKEN, np.int32)
            source.engine.submit(Request(name, np.concatenate([job.prompt, done]), _GREEDY, 1, 0))
            self._wake(source)

    def _send(self, source: Seat, send: KvSend) -> None:
        """Transfer what the decode engine lacks; a link sends one prompt after the other."""
        num_bytes = (send.num_tokens - send.num_cached) * self._d.kv_token_bytes
        source.free_at = max(self._events.now, source.free_at) + num_bytes / self._d.link_bytes_s
        self._events.at(source.free_at + self._d.network_s, self._arrive, send, send.num_tokens - 1)

    def _arrive(self, send: KvSend, num_tokens: int | None) -> None:
        target = send.target
        if target.engine is send.engine and target.is_up and target.orders is not None:
            target.orders.arrive(send.job.name, num_tokens)
            self._wake(target)
