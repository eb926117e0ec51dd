"""Frames between ranks: what goes in comes out, and whatever else comes in is a ProtocolError."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.distributed import messages as m
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.proposer import DraftRequest
from fastdeploy_sd.types import DraftTokens, LogprobArrays, NewRequest, RequestDelta, SchedulerOutput
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.worker.ranks import commands as c
from tests.doubles.engines import toy_request
from tests.values import i32

pytestmark = pytest.mark.slow


def plan(logprobs: LogprobArrays | None = None) -> SchedulerOutput:
    sampling = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(9,))
    request = toy_request("new", [4, 5, 6], cache_salt="s", sampling=sampling)
    return SchedulerOutput(
        step_id=7,
        request_ids=("old", "new"),
        new=(NewRequest(request, i32(4, 5, 6), 3, (8, 2)),),
        deltas=(RequestDelta("old", (1,)),),
        num_computed_tokens=i32(12, 0),
        num_new_tokens=i32(3, 3),
        draft=DraftTokens(i32(50, 51), i32(0, 2, 2), np.array([1, 3], np.int8), logprobs, i32(-1, 0)),
        max_draft_len=i32(3, 0),
        finished_ids=("gone",),
        preempted_ids=("back",),
    )


MESSAGES: list[m.Order | m.Reply] = [
    c.TakePlan(plan(), ("new",)),
    c.RunRows(1),
    c.RunRows(2, i32(0, 3)),
    c.TakeOutput(i32(50, 52), i32(0, 2, 2)),
    c.BeginDrafts("mtp", (DraftRequest("new", 4, 3, 3, 2, "s", "mtp", (1,), 2),)),
    c.ForgetDrafts("mtp", i32(4)),
    c.DraftRows(3, "mtp", i32(4), i32(2)),
    c.DraftOutcome(has_succeeded=False),
    m.Measure(),
    m.AllReducedMin(1 << 40),
    m.StopRank(),
    m.Loaded(),
    m.Measurement(3),
    m.RankReady(),
    m.AttemptDone(c.RankFailure("KeyError()", has_lost_experts=True)),
    m.RankFailed(WireError.of(CheckpointError("model: expected", param="model"))),
]


def plain(value: Any) -> Any:
    """A value in a form that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was(message: m.Order | m.Reply) -> None:
    assert plain(m.decode(m.frame_of([m.encode(message)]))[0]) == plain(message)


def test_a_frame_holds_any_number_of_messages() -> None:
    frame = m.frame_of([m.encode(message) for message in MESSAGES])
    assert [plain(message) for message in m.decode(frame)] == [plain(message) for message in MESSAGES]
    assert m.decode(m.frame_of([])) == []


def test_log_probabilities_of_drafts_do_not_travel() -> None:
    """They have two dimensions, and no rank but the first has a use for them."""
    with pytest.raises(ProtocolError, match=r"expected int32\[n\]"):
        m.encode(c.TakePlan(plan(LogprobArrays.empty(2, 3)), ()))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_truncated_frame_is_refused(message: m.Order | m.Reply) -> None:
    frame = m.frame_of([m.encode(message)])
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            m.decode(frame[:length])


@pytest.mark.parametrize(
    "frame",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"\xff",
        b"\x91\x91\x63",
        b"\x91\x91\xc3",
        b"\x91\xc0",
        b"\xc0",
        b"\x93\x02\xc4\x01",
        m.frame_of([m.encode(c.RunRows(1))]) + b"\xc0",
        b"{}",
    ],
)
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(frame)
