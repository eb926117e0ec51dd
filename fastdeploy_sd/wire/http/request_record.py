"""Facts about one HTTP request for metrics and the log. Knows no logger and no metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from fastdeploy_sd.types import RequestMetrics

_KEY = "fastdeploy_sd.record"


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        started: of `time.monotonic`, when its headers were complete.
        status: of the answer; 0 until one begins.
        reason: code, else type, of the error it was answered with, also inside a stream; "" = none.
        request_id: id of the response; "" until there is one. model: that the client asked; "" = none.
        usage: returns what a generation has cost so far, as OpenAI's `usage`; None = there was none.
        metrics: of its choices that have ended.
    """

    started: float = field(default_factory=time.monotonic)
    status: int = 0
    reason: str = ""
    request_id: str = ""
    model: str = ""
    usage: Callable[[], Mapping[str, Any]] | None = None
    metrics: list[RequestMetrics] = field(default_factory=list)


def begin_record(scope: Scope) -> RequestRecord:
    record: RequestRecord = RequestRecord()
    scope[_KEY] = record
    return record


def record_of(scope: Scope) -> RequestRecord:
    """Return the request's record; without a middleware that keeps one, a record that is thrown away."""
    record: RequestRecord = scope.get(_KEY) or RequestRecord()
    return record
