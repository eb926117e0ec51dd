"""What the policy 'fair' promises to clients and to short prompts, and what it costs long ones."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.errors import Overloaded
from tests.doubles.bench import Bench
from tests.doubles.engines import toy_request


def steps_to_first_token(bench: Bench, name: str, most: int = 1000) -> int:
    """Step until a request has a token; returns how many steps that took."""
    for count in range(1, most):
        bench.step()
        if name in bench.outputs:
            return count
    raise AssertionError(f"{name} got no token within {most} steps")


def test_a_client_with_nothing_running_gets_a_seat_in_the_next_step() -> None:
    bench = Bench(max_num_seqs=4, policy="fair")
    bench.submit(*(toy_request(f"a{i}", [2, 3 + i], 50, client="a") for i in range(20)))
    for _ in range(3):
        bench.step()
    bench.submit(toy_request("b", [60], 5, client="b"))
    assert "b" in bench.step()
    assert bench.plans[-1].preempted_ids == ("a3",), "of the client with the most seats, the latest"
    while "b" not in bench.transcript.last:
        assert "b" in bench.step()
    assert "a3" in bench.step(), "and it goes on as soon as there is a seat"
    bench.finish()
    assert all(len(tokens) == 50 for name, tokens in bench.transcript.token_ids.items() if name.startswith("a"))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_let_it_wait(policy: str) -> None:
    bench = Bench(max_num_seqs=4, policy=policy)
    bench.submit(*(toy_request(f"a{i}", [2, 3 + i], 20, client="a") for i in range(8)))
    bench.step()
    bench.submit(toy_request("b", [60], 5, client="b"))
    assert steps_to_first_token(bench, "b") > 30


def test_seats_that_become_free_go_to_the_client_with_the_fewest() -> None:
    bench = Bench(max_num_seqs=4, policy="fair")
    bench.submit(*(toy_request(f"a{i}", [2, 3 + i], 2 + i, client="a") for i in range(12)))
    bench.step()
    bench.submit(*(toy_request(f"b{i}", [40, 3 + i], 50, client="b") for i in range(12)))
    while len(bench.transcript.last) < 4:
        bench.step()
    assert {name[0] for name in bench.plans[-1].request_ids} == {"a", "b"}
    counts = [name[0] for name in bench.plans[-1].request_ids]
    assert (counts.count("a"), counts.count("b")) == (2, 2)


def test_clients_that_have_one_seat_each_keep_it() -> None:
    bench = Bench(max_num_seqs=2, policy="fair")
    bench.submit(toy_request("a", [2], 9, client="a"), toy_request("b", [3], 9, client="b"))
    bench.step()
    bench.submit(toy_request("c", [4], 9, client="c"))
    assert list(bench.step()) == ["a", "b"]
    assert bench.finish().last["c"].metrics.num_preemptions == 0  # type: ignore[union-attr]


def test_blocks_are_taken_back_from_a_client_that_holds_them_all() -> None:
    bench = Bench(info={"num_blocks": 16}, max_num_seqs=8, max_num_batched_tokens=64, policy="fair")
    bench.submit(*(toy_request(f"a{i}", range(2 + i, 14 + i), 30, client="a") for i in range(8)))
    bench.step()
    bench.submit(toy_request("b", range(60, 76), 2, client="b"))
    assert "b" in bench.step()
    bench.finish()


def test_a_full_queue_of_one_client_refuses_that_client_only() -> None:
    bench = Bench(max_num_seqs=1, max_num_queued_requests=4, policy="fair")
    bench.submit(*(toy_request(f"a{i}", [2], 4, client="a") for i in range(4)))
    with pytest.raises(Overloaded):
        bench.submit(toy_request("a4", [2], 4, client="a"))
    bench.submit(toy_request("b0", [3], 4, client="b"))
    with pytest.raises(Overloaded):
        bench.submit(toy_request("b1", [3], 4, client="b"))
    for i in range(20):  # names cost nothing, so as many as the queue is long
        try:
            bench.submit(toy_request(f"c{i}", [3], 4, client=f"c{i}"))
        except Overloaded:
            break
    assert bench.engine.stats().num_waiting <= 8
    bench.finish()


def test_a_short_prompt_gets_half_of_the_machine_at_once() -> None:
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=16, policy="fair", info={"num_blocks": 4096})
    bench.submit(*(toy_request(f"long{i}", [2 + i] * 900, 1) for i in range(3)))
    bench.step()
    bench.submit(toy_request("short", [90] * 20, 1))
    assert steps_to_first_token(bench, "short") == 3, "20 tokens at 8 a step"
    bench.submit(*(toy_request(f"tiny{i}", [80 + i], 1) for i in range(4)))
    assert {f"tiny{i}" for i in range(4)} <= set(bench.step()), "several at once"


def test_a_long_prompt_takes_at_most_twice_as_long_beside_short_ones() -> None:
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=16, policy="fair", info={"num_blocks": 4096})
    bench.submit(toy_request("long", [2] * 800, 1))
    count = 0
    while "long" not in bench.outputs:
        bench.submit(toy_request(f"s{count}", [3 + count % 90] * 16, 1))
        bench.step()
        count += 1
    assert count <= 2 * 800 // 16 + 1


def test_prompts_of_one_length_run_in_their_order() -> None:
    ends = {}
    for policy in ("fair", "fcfs"):
        bench = Bench(max_num_seqs=8, max_num_batched_tokens=16, policy=policy, info={"num_blocks": 4096})
        bench.submit(*(toy_request(f"r{i}", [2 + i] * 100, 1) for i in range(6)))
        ends[policy] = [steps_to_first_token(bench, f"r{i}") for i in range(6)]
    assert ends["fair"] == ends["fcfs"]


def test_no_room_is_lost_while_prompts_wait() -> None:
    rng = random.Random(3)
    bench = Bench(max_num_seqs=6, max_num_batched_tokens=16, policy="fair", info={"num_blocks": 4096})
    bench.submit(
        *(toy_request(f"r{i}", [rng.randrange(2, 90) for _ in range(rng.randint(1, 60))], 1) for i in range(40))
    )
    while bench.engine.stats().num_waiting:
        assert sum(bench.step().values()) == 16
