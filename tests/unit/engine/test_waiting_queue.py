from __future__ import annotations

import random

from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.requests.waiting_queue import WaitingQueue
from fastdeploy_sd.types import SpeculationInfo
from tests.doubles.engines import toy_request


def waiting(name: str, key: tuple[int, int], num_prompt: int = 1, client: str = "") -> RequestState:
    return RequestState(toy_request(name, [2] * num_prompt), key, 1.0, SpeculationInfo(), RequestCounters(), client)


def test_the_lowest_key_is_next() -> None:
    queue = WaitingQueue()
    for name, key in (("late", (0, 2)), ("urgent", (-1, 3)), ("early", (0, 1))):
        queue.push(waiting(name, key))
    order = []
    while (state := queue.peek({})) is not None:
        order.append(state.request_id)
        queue.remove(state)
    assert order == ["urgent", "early", "late"]
    assert len(queue) == 0


def test_prompt_tokens_are_counted() -> None:
    queue, states = WaitingQueue(), [waiting("a", (0, 0), 3), waiting("b", (0, 1), 4)]
    for state in states:
        queue.push(state)
    assert queue.num_prompt_tokens == 7
    queue.remove(states[1])
    assert queue.num_prompt_tokens == 3
    assert list(queue) == states[:1]


def test_the_client_with_the_fewest_seats_is_next_and_its_requests_go_by_key() -> None:
    queue = WaitingQueue()
    for i, client in enumerate("aabbc"):
        queue.push(waiting(f"{client}{i}", (0, i), client=client))
    seats = {"a": 2, "b": 1, "c": 1}
    order = []
    while (state := queue.peek(seats)) is not None:
        order.append(state.request_id)
        queue.remove(state)
        seats[state.client] += 1
    assert order == ["b2", "c4", "a0", "b3", "a1"]


def test_waiting_requests_are_listed_by_length() -> None:
    queue = WaitingQueue()
    for i, length in enumerate((5, 2, 9, 2)):
        queue.push(waiting(f"r{i}", (0, i), length))
    assert [state.request_id for state in queue] == ["r1", "r3", "r0", "r2"]


def test_random_walk_against_a_sorted_list() -> None:
    rng, queue = random.Random(0), WaitingQueue()
    inside: list[RequestState] = []
    outside: list[RequestState] = []  # admitted before; may come back with its old key
    for i in range(3000):
        action = rng.random()
        if action < 0.4:
            inside.append(waiting(f"r{i}", (rng.randint(0, 2), i), rng.randint(1, 3), rng.choice("abc")))
            queue.push(inside[-1])
        elif action < 0.5 and outside:
            inside.append(outside.pop())
            queue.push(inside[-1])
        elif action < 0.75 and inside:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        elif inside:
            head = min(inside, key=lambda state: state.key)
            assert queue.peek({}) is head
            queue.remove(head)
            inside.remove(head)
            outside.append(head)
        assert len(queue) == len(inside)
        assert queue.peek({}) is min(inside, key=lambda state: state.key, default=None)
