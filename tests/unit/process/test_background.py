"""Functions in threads, and what their caller is told."""

from __future__ import annotations

import select
import threading

import pytest

from fastdeploy_sd.process.background import BackgroundCalls

WAIT_S = 60.0


def test_calls_are_taken_once_in_the_order_of_their_ends() -> None:
    calls, may_end = BackgroundCalls(), threading.Event()
    first, second = calls.start(lambda: may_end.wait(WAIT_S), "first"), calls.start(lambda: 1 // 0, "second")
    assert select.select([calls.fd], [], [], WAIT_S)[0]
    assert calls.take() == [second]
    assert not select.select([calls.fd], [], [], 0)[0]
    assert calls.take() == []
    may_end.set()
    assert first.result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        second.result()
    assert select.select([calls.fd], [], [], WAIT_S)[0]
    assert calls.take() == [first]
    late = calls.start(lambda: may_end.wait(WAIT_S), "late")
    calls.close()
    calls.close()
    assert late.result(WAIT_S)
