"""What a simulation has in its hands: the deployment, its engines' places, requests, and the queue of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.cluster.engines import EngineShape, KvOrders, SimulatedEngine
from benchmarks.cluster.routing import Front
from benchmarks.cluster.workload import Conversation
from fastdeploy_sd.cluster.placement import MAX_ENTRIES, PREFERENCE
from fastdeploy_sd.cluster.router.choice import Placement, RoutingHints
from fastdeploy_sd.cluster.router.options import RoutingConfig
from fastdeploy_sd.types import I32

COMPLETE, REFUSED, LOST = "complete", "refused", "lost"


class EventQueue:
    """Calls in the order of their times, in seconds; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events = 0

    def at(self, when: float, call: Callable[..., None], *args: object) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, call, args))

    def run_next(self) -> None:
        self.now, _, call, args = heapq.heappop(self._events)
        call(*args)


@dataclass(frozen=True, slots=True)
class Faults:
    """Instances that die, fall silent or are slow: `num_deaths` and `num_hangs` begin spread over `span_s`."""

    num_deaths: int = 0
    num_hangs: int = 0
    num_slow: int = 0
    slow_factor: float = 3.0
    restart_s: float = 30.0
    span_s: float = 60.0

    @property
    def num_instances(self) -> int:
        return self.num_slow + self.num_deaths + self.num_hangs


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated.

    Attributes:
        preference, max_entries: of the product's placement.
        num_engines: of each instance; each is a member of the deployment.
        num_prefill: of the instances; the others decode. 0 = all do both.
        uses_redis: clients send to any instance, which places requests by records in Redis; there is no router.
        is_sticky: all turns of a conversation come to the router, or the server, that got the first.
        network_s: one way, between any two processes.
        kv_token_bytes, link_bytes_s: size of a token's KV, and how fast an engine sends it.
    """

    shape: EngineShape
    num_instances: int
    policy: str
    preference: float = PREFERENCE
    max_entries: int = MAX_ENTRIES
    num_engines: int = 1
    num_prefill: int = 0
    num_routers: int = 1
    uses_redis: bool = False
    is_sticky: bool = False
    network_s: float = 0.0002
    kv_token_bytes: int = 1 << 16
    link_bytes_s: float = 1.25e9
    faults: Faults = field(default_factory=Faults)
    routing: RoutingConfig = field(default_factory=RoutingConfig)


@dataclass(eq=False, slots=True)
class Job:
    """A request; times are the client's, in seconds. `ended`: COMPLETE, REFUSED or LOST, "" = it has not."""

    name: str
    chat: Chat
    prompt: I32
    num_wanted: int
    due_s: float
    front: Front
    hints: RoutingHints
    first_s: float | None = None
    end_s: float = 0.0
    num_done: int = 0
    num_moves: int = 0
    ended: str = ""
    placement: Placement | None = None
    seat: Seat | None = None
    has_source: bool = False
    refused_by: set[str] = field(default_factory=set)
    num_broken: int = 0
    num_events: int = 0
    failing_since: float | None = None


@dataclass(eq=False, slots=True)
class Chat:
    """A conversation under way; `history` is all its tokens, i32[n]."""

    of: Conversation
    history: I32
    next_turn: int = 0
    front: Front | None = None


@dataclass(eq=False, slots=True)
class Seat:
    """A place of an engine; another one is started there after the one before has died."""

    place: str
    role: str
    slowdown: float
    engine: SimulatedEngine
    orders: KvOrders | None = None
    is_up: bool = True
    is_hung: bool = False
    num_starts: int = 0
    last_beat: float = 0.0
    free_at: float = 0.0  # of its link
    jobs: set[Job] = field(default_factory=set)
    sends: dict[str, KvSend] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class KvSend:
    """A prompt whose KV a decode engine waits for; `num_cached`: of its tokens, those that this has."""

    job: Job
    target: Seat
    engine: SimulatedEngine
    num_tokens: int
    num_cached: int


@dataclass(slots=True)
class Outcome:
    """What came of a simulation; `imbalance`: load of the fullest member over the mean, one value
    per second while conversations begin.

    Attributes:
        num_cut: conversations that ended as their next prompt was too long.
        num_query_tokens, num_hit_tokens: of prompts that were looked up in prefix caches / found there.
        num_rows: tokens of all steps.
    """

    jobs: list[Job] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    num_cut: int = 0
    num_steps: int = 0
    num_rows: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    end_s: float = 0.0
