"""Requests of a simulated deployment: from clients through routers to engines, and elsewhere after failures.

Modelled are times: of steps, of the network, of transfers of KV, of restarts. Every decision is the product's code,
but for the few lines of `Relay` that say when a request that failed goes on elsewhere (`_retry`), which need a socket.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from benchmarks.cluster.deployment import COMPLETE, LOST, REFUSED, Chat, Deployment, EventQueue, Job, Outcome
from benchmarks.cluster.fleet import Fleet
from benchmarks.cluster.routing import Front, RedisFront, SimulatedRouter, table_of
from benchmarks.cluster.workload import MAX_MODEL_LEN, OUTPUT_TOKEN, Conversation
from fastdeploy_sd.cluster.placement import PrefixTable
from fastdeploy_sd.cluster.router.choice import Placement, RoutingHints
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import RequestOutput

_STUCK_S = 86_400.0
# As in cluster/router/relay.py.
_POLL_S, _REFUSED_S, _MANY_EVENTS = 0.1, 0.5, 32


class Simulation:
    """One run; equal seeds give equal outcomes."""

    def __init__(self, deployment: Deployment, conversations: Iterable[Conversation], seed: int) -> None:
        self._d = d = deployment
        self._rng = random.Random(seed)
        self._conversations: Iterator[Conversation] = iter(conversations)
        self._events = EventQueue()
        self._heard_at = 0.0  # when a request began or ended
        self._num_open = 0  # conversations under way, and the one to come
        routers = [self._router() for _ in range(1 if d.uses_redis else d.num_routers)]
        self._fronts: list[SimulatedRouter] | list[RedisFront] = routers
        if d.uses_redis:
            places = [f"{i}.0" for i in range(d.num_instances)]
            self._fronts = [RedisFront(place, self._table(), routers[0], lambda: self._events.now) for place in places]
        self._fleet = Fleet(d, self._events, routers, self._rng, self)

    def _table(self) -> PrefixTable:
        d = self._d
        return table_of(d.policy, d.preference, d.max_entries, random.Random(self._rng.random()))

    def _router(self) -> SimulatedRouter:
        return SimulatedRouter(self._table(), self._d.routing, lambda: self._events.now)

    def run(self) -> Outcome:
        """Run to the end, once."""
        self._begin_next()
        while self._num_open:
            self._events.run_next()
            if self._events.now > self._heard_at + _STUCK_S:
                raise InternalError(f"simulation: expected every request to end, got {self._num_open} that do not")
        return self._fleet.end()

    # Clients

    def _begin_next(self) -> None:
        """Await the next conversation."""
        conversation = next(self._conversations, None)
        self._fleet.samples = conversation is not None
        if conversation is not None:
            self._num_open += 1
            self._events.at(max(conversation.begin_s, self._events.now), self._begin, conversation)

    def _begin(self, conversation: Conversation) -> None:
        self._begin_next()
        self._ask(Chat(conversation, np.zeros(0, np.int32)))

    def _ask(self, chat: Chat) -> None:
        turn = chat.of.turns[chat.next_turn]
        chat.next_turn += 1
        prompt = np.concatenate([chat.history, turn.added])
        if len(prompt) + turn.num_output > min(MAX_MODEL_LEN, self._fleet.most_tokens):
            self._fleet.outcome.num_cut += 1
            self._num_open -= 1
            return
        front = chat.front if self._d.is_sticky and chat.front in self._fronts_up() else self._any_front()
        chat.front = front
        name = str(len(self._fleet.outcome.jobs))
        job = Job(name, chat, prompt, turn.num_output, self._events.now, front, front.hints(prompt))
        self._fleet.outcome.jobs.append(job)
        self._heard_at = self._events.now
        self._fleet.jobs[name] = job
        placement = front.choose(job.hints)
        if placement is None:
            self._end(job, LOST)
        else:
            self._give(job, placement)

    def _any_front(self) -> Front:
        """Where a client's load balancer sends it: to one that is up, unless none is."""
        fronts: list[Front] = self._fronts_up() or [*self._fronts]
        return self._rng.choice(fronts)

    def _fronts_up(self) -> list[Front]:
        return [of for of in self._fronts if not isinstance(of, RedisFront) or self._fleet.is_up(of.place)]

    def note_fall(self, places: Sequence[str]) -> None:
        """What came to an instance directly is lost with it."""
        lost = [
            job for job in self._fleet.jobs.values() if isinstance(job.front, RedisFront) and job.front.place in places
        ]
        for job in lost:
            if job.seat is not None:
                self._fleet.abort(job.seat, job)
                self._leave(job)
            job.placement = job.seat = None
            self._end(job, LOST)

    def _end(self, job: Job, how: str) -> None:
        job.ended, job.end_s = how, self._events.now + self._d.network_s
        self._heard_at = self._events.now
        del self._fleet.jobs[job.name]
        job.hints, chat = RoutingHints(()), job.chat
        prompt, job.prompt = job.prompt, job.prompt[:0]
        if how != COMPLETE or chat.next_turn == len(chat.of.turns):
            self._num_open -= 1
            return
        chat.history = np.concatenate([prompt, np.full(job.num_done, OUTPUT_TOKEN, np.int32)])
        turn = chat.of.turns[chat.next_turn]
        self._events.at(max(self._events.now + turn.pause_s, turn.due_s), self._ask, chat)

    # A request's way through a router

    def _give(self, job: Job, placement: Placement) -> None:
        job.placement, job.has_source = placement, placement.source is not None
        placement.instance.begin()
        placement.instance.circuit.begin()
        if placement.source is not None:
            placement.source.begin()
        job.seat = self._fleet.seat_of(placement.instance.instance_id)
        job.seat.jobs.add(job)
        self._events.at(self._events.now + self._d.network_s, self._reach, job, placement)

    def _reach(self, job: Job, placement: Placement) -> None:
        if job.placement is not placement or job.seat is None or job.seat.is_hung:
            return
        if not job.seat.is_up:
            self.fail(job, is_refusal=False)
            return
        self._fleet.submit(job.seat, job)

    def _leave(self, job: Job) -> None:
        """The request is not at its instance any more."""
        assert job.placement is not None, "it was given to one"
        assert job.seat is not None, "it was given to one"
        job.placement.instance.end()
        if job.has_source and job.placement.source is not None:
            job.placement.source.end()
        job.has_source = False
        job.seat.jobs.discard(job)

    def fail(self, job: Job, *, is_refusal: bool) -> None:
        assert job.placement is not None, "it was given to one"
        self._leave(job)
        instance = job.placement.instance
        instance.circuit.note(is_failure=not is_refusal)
        job.hints.tried.add(instance.instance_id)
        if is_refusal:
            job.refused_by.add(instance.instance_id)
        else:
            job.num_broken += 1
        job.placement = job.seat = None
        job.num_events = 0
        if job.failing_since is None:
            job.failing_since = self._events.now
        self._retry(job, self._events.now)

    def _retry(self, job: Job, begin: float) -> None:
        """See `Relay._next_place`."""
        if job.ended:
            return
        has_started, routing = job.num_done > 0, self._d.routing
        deadline = (job.failing_since or 0.0) + (routing.resume_s if has_started else 0.0)
        if job.num_broken < routing.max_attempts:
            if has_started and self._events.now - begin >= _REFUSED_S:
                job.hints.tried -= job.refused_by
            placement = job.front.choose(job.hints)
            is_new = placement is not None and placement.instance.instance_id not in job.hints.tried
            if placement is not None and (is_new or (self._events.now >= deadline and not job.refused_by)):
                job.num_moves += 1
                self._give(job, placement)
                return
            if self._events.now < deadline:
                self._events.at(self._events.now + _POLL_S, self._retry, job, begin)
                return
        self._end(job, REFUSED if job.refused_by and not has_started else LOST)

    def take(self, job: Job, output: RequestOutput) -> None:
        if not job.num_events:
            self._note_first(job)
        job.num_events += 1
        if job.num_events == _MANY_EVENTS:
            job.num_broken = 0
        job.num_done += len(output.token_ids)
        if output.finish_reason is not None:
            assert job.placement is not None, "it has been answered by one"
            self._leave(job)
            job.placement.instance.circuit.note(is_failure=False)
            self._end(job, COMPLETE)

    def _note_first(self, job: Job) -> None:
        """The prompt has been computed."""
        if job.first_s is None:
            job.first_s = self._events.now + self._d.network_s
        job.failing_since = None
        if job.has_source and job.placement is not None and job.placement.source is not None:
            job.placement.source.end()
            job.has_source = False
