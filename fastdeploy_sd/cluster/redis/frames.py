"""What instances say to each other through Redis, as signed frames. Knows no Redis.

A frame counts only in the list or record that it was put into.

A request at another instance has a lease that both sides keep up. The process that waits for outputs is the *origin*.
At every beat it asks for its requests there (`Orders.waiting`), and the instance answers which of them it does not
have. An instance ends the requests of an origin that is silent for the deployment's `timeout_s`. An origin has a
request go on elsewhere when the instance is silent as long, or does not have it. So a frame may be lost or come twice
at any place, and Redis may lose everything it has.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.cluster.membership import InstanceLoad, Member
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.types import FinishReason, Request, RequestOutput, SpeculationInfo
from fastdeploy_sd.wire.protocol import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """What an instance says of itself at each heartbeat.

    Attributes:
        member: the instance; its fingerprint is a digest of everything that a request's tokens and limits depend on.
        server: its server, whose HTTP processes know it under that name.
        engine: its number among the engines of that.
        sent_at: seconds, by Redis's clock.
        load_at: when the engine was asked for its load, by the same clock.
    """

    member: Member
    server: str
    engine: int
    sent_at: float
    load_at: float
    speculation: SpeculationInfo
    load: InstanceLoad
    max_num_queued: int

    def __post_init__(self) -> None:
        if self.max_num_queued < 1:
            raise ValueError(f"max_num_queued: expected a positive number, got {self.max_num_queued}")


@dataclass(frozen=True, slots=True)
class Submission:
    """Run this request; its handle is never used again by its origin."""

    handle: int
    request: Request


@dataclass(frozen=True, slots=True)
class Ending:
    """End this request with that reason; an unknown handle is ignored."""

    handle: int
    reason: FinishReason

    def __post_init__(self) -> None:
        if self.reason not in (FinishReason.ABORT, FinishReason.STOP):
            raise ValueError(f"expected the reason abort or stop, got {self.reason}")


@dataclass(frozen=True, slots=True)
class Orders:
    """From an origin to an instance; with a `beat` > 0, `waiting` is a question for requests up to `newest`."""

    origin: str
    submissions: tuple[Submission, ...] = ()
    endings: tuple[Ending, ...] = ()
    beat: int = 0
    waiting: tuple[int, ...] = ()
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """An output of a request; `position`: tokens of this request that were in outputs before this one, under the same
    handle.
    """

    handle: int
    position: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The request was not taken, or ended with an error."""

    handle: int
    error: WireError


@dataclass(frozen=True, slots=True)
class Answers:
    """From an instance to an origin; `unknown`: of the requests that the origin asked for in `beat`, those not here."""

    instance: str
    items: tuple[Item, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    beat: int = 0
    unknown: tuple[int, ...] = ()


PROTOCOL = Protocol(9, Record, Orders, Answers)
CLUSTER = "cluster"


def requests_of(instance: str) -> str:
    """The list of Orders for an instance."""
    return f"requests.{instance}"


def results_of(origin: str) -> str:
    """The list of Answers for an origin."""
    return f"results.{origin}"
