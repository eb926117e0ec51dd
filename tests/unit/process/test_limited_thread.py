"""Functions in threads, and how they are stopped."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fastdeploy_sd.process.limited_thread import TimeLimitError, run_within

DEADLINE_S = 60.0


def spin() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:
            continue


async def test_a_result_and_an_error_are_those_of_the_function() -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert await run_within(1.0, threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await run_within(1.0, lambda: 1 // 0)


async def test_a_function_that_computes_for_too_long_is_stopped_and_its_thread_goes_on() -> None:
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            with pytest.raises(TimeLimitError):
                await run_within(0.01, spin)
            threads = await asyncio.gather(*(run_within(1.0, threading.get_ident) for _ in range(8)))
            assert len(threads) == 8


async def test_a_function_that_swallows_the_first_stop_meets_the_next() -> None:
    def swallow_once_and_spin() -> None:
        try:
            spin()
        except TimeLimitError:  # as callbacks of the garbage collector do
            spin()

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TimeLimitError):
            await run_within(0.01, swallow_once_and_spin)


async def test_a_function_that_only_waits_is_left_alone() -> None:
    async with asyncio.timeout(DEADLINE_S):
        await run_within(0.02, lambda: time.sleep(0.1))


async def test_a_function_whose_caller_leaves_is_stopped() -> None:
    started, ended = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        try:
            spin()
        finally:
            ended.set()

    task = asyncio.create_task(run_within(DEADLINE_S, run))
    await asyncio.to_thread(started.wait, DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, DEADLINE_S)
