"""A method that fails costs drafts; a device that is lost costs the engine."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest

from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.spec_decode.draft_guard import DraftGuard
from tests.unit.spec_decode.test_hybrid import RecordedModel, begin, step


class LostModel(RecordedModel):
    """On a device that is gone."""

    def begin(self, requests: object) -> NoReturn:
        raise DeviceLost("a kernel went wrong")

    def propose(self, x: object) -> NoReturn:
        raise DeviceLost("a kernel went wrong")


@pytest.mark.usefixtures("expects_step_failures")
def test_a_lost_device_is_not_taken_for_a_request_that_cannot_be_drafted_for() -> None:
    guard = DraftGuard(LostModel({}))
    with pytest.raises(DeviceLost):
        begin(guard, 0, 1)
    with pytest.raises(DeviceLost):
        step(guard, [0, 1], [1, 1])
    guard.give_up(["0"], np.array([0], np.int32))  # from here on rows are drafted for apart
    with pytest.raises(DeviceLost):
        step(guard, [0, 1], [1, 1])
