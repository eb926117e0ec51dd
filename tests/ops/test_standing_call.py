"""Calls whose params stay from step to step: what is looked at again, and what must be."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops.native.activation import SwigluParams
from fastdeploy_sd.ops.native.sampling import Sampler
from fastdeploy_sd.ops.native.standing_call import Room, StandingCall
from tests.ops.sampling_arrays import build_sampling_arrays


def test_an_array_is_looked_at_again_when_another_shape_is_expected() -> None:
    call, x = StandingCall("swiglu", SwigluParams()), np.zeros((2, 8), np.float32)
    call.bind("gate_up", x, (2, 8), np.float32)
    call.bind("gate_up", x, (2, 8), np.float32)
    with pytest.raises(ValueError, match=r"gate_up: expected contiguous float32\[3, 8\], got float32\[2, 8\]"):
        call.bind("gate_up", x, (3, 8), np.float32)


def test_a_field_follows_the_array_it_is_bound_to() -> None:
    params = SwigluParams()
    call = StandingCall("swiglu", params)
    for array in (np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32)):
        call.bind("gate_up", array, (2, 8), np.float32)
        assert params.gate_up == array.ctypes.data
    call.bind("gate_up", None, (), np.float32)
    assert params.gate_up is None


def test_room_grows_and_keeps_its_views() -> None:
    room = Room(np.int32, (3,))
    assert room.reserve(5)
    first = room.first(5)
    assert first.shape == (5, 3)
    assert room.first(5) is first
    assert not room.reserve(8)
    assert room.first(5) is first
    assert room.reserve(9)
    assert not np.shares_memory(room.first(5), first)


def test_drawing_again_sees_what_is_in_the_arrays_now() -> None:
    sampler, rows = Sampler(), np.zeros(2, np.int32)
    logits = np.zeros((2, 16), np.float32)
    logits[:, 3] = 1
    with pytest.raises(ValueError, match="draw_again: expected a draw before"):
        sampler.draw_again()
    sampling = build_sampling_arrays(1, 2, temperature=0.0)
    assert sampler.draw(logits, rows, rows, sampling).tolist() == [3, 3]
    logits[1, 7] = 2
    assert sampler.draw_again().tolist() == [3, 7]


def test_a_draw_that_was_refused_cannot_be_drawn_again() -> None:
    sampler, rows = Sampler(), np.zeros(2, np.int32)
    sampling = build_sampling_arrays(1, 2, temperature=0.0)
    logits = np.eye(2, 16, dtype=np.float32)
    sampler.draw(logits, rows, rows, sampling)
    with pytest.raises(ValueError, match="positions: expected"):
        sampler.draw(logits, rows, rows[:1], sampling)
    with pytest.raises(ValueError, match="draw_again: expected a draw before"):
        sampler.draw_again()
    assert sampler.draw(logits, rows, rows, sampling).tolist() == [0, 1]
