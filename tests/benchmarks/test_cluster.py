"""Simulated deployments: nothing is lost uncounted, equal seeds give equal outcomes, and queues are right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.cluster.deployment import COMPLETE, Deployment, Faults
from benchmarks.cluster.engines import EngineShape, LinearTimes
from benchmarks.cluster.experts import SkewedExperts, balances
from benchmarks.cluster.report import Figures
from benchmarks.cluster.simulation import Simulation
from benchmarks.cluster.workload import Conversation, Mix, Turn, recorded, traced
from fastdeploy_sd.config import Config, ModelConfig, SchedulerConfig
from fastdeploy_sd.errors import ConfigError

MIX = Mix(num_requests=120, rate=30.0, seed=1, num_shared=4, output_len=12, pause_s=0.3)


def shape_of(times: LinearTimes | None = None, num_blocks: int = 1024, **limits: Any) -> EngineShape:
    config = Config(model=ModelConfig(model="simulated"), scheduler=SchedulerConfig(**limits))
    return EngineShape(config, num_blocks, times or LinearTimes(5.0, 0.2, 0.05), 0.0)


def figures_of(mix: Iterable[Conversation], policy: str = "load+prefix", size: int = 4, **options: Any) -> Figures:
    deployment = Deployment(options.pop("shape", shape_of()), size, policy, **options)
    return Figures.of(size, policy, Simulation(deployment, mix, seed=3).run())


def arrivals(count: int, rate: float, num_prompt: int = 8, num_output: int = 1) -> Iterator[Conversation]:
    """Requests of one length, each with a text of its own."""
    rng = np.random.default_rng(5)
    now = 0.0
    for _ in range(count):
        now += rng.exponential(1 / rate)
        yield Conversation(now, (Turn(rng.integers(4, 30000, num_prompt, np.int32), num_output),))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_engines": 2, "num_routers": 2},
        {"faults": Faults(num_deaths=2, num_hangs=1, num_slow=1, restart_s=2.0, span_s=4.0)},
        {"num_prefill": 2, "faults": Faults(num_deaths=2, restart_s=1.0, span_s=4.0)},
        {"uses_redis": True, "faults": Faults(num_deaths=1, num_hangs=1, restart_s=1.0, span_s=4.0)},
        {"shape": shape_of(max_num_seqs=2, max_num_queued_requests=2)},
        {"shape": shape_of(num_blocks=80)},
    ],
    ids=["plain", "engines", "faults", "prefill", "redis", "full queues", "small caches"],
)
def test_every_request_ends_once_and_equal_seeds_give_equal_outcomes(options: dict[str, Any]) -> None:
    found = [figures_of(MIX.conversations(), **options) for _ in range(2)]
    assert found[0] == found[1]
    of = found[0]
    assert of.num_complete + of.num_refused + of.num_lost == of.num_requests > 0
    if "faults" in options:
        assert of.num_moved + of.num_lost > 0, "the faults hit nothing"
    elif "shape" not in options:
        assert of.num_requests == of.num_complete == MIX.num_requests


def test_a_death_costs_answers_nothing_but_time() -> None:
    """Streams go on at other instances after the tokens that have come; none gets fewer or more than it wants."""
    faults = Faults(num_deaths=1, restart_s=1.0, span_s=4.0)
    outcome = Simulation(Deployment(shape_of(), 4, "load+prefix", faults=faults), MIX.conversations(), 0).run()
    moved = [job for job in outcome.jobs if job.num_moves]
    assert moved
    assert all(job.ended == COMPLETE and job.num_done == job.num_wanted for job in outcome.jobs)


@pytest.mark.slow
def test_one_instance_is_an_m_d_1_queue() -> None:
    """Poisson arrivals, one request at a time, a service of one step: mean wait rho * D / (2 * (1 - rho))."""
    step_ms, load, network_s = 10.0, 0.6, 0.0002
    shape = shape_of(LinearTimes(step_ms, 0.0, 0.0), max_num_seqs=1, max_num_queued_requests=10_000)
    deployment = Deployment(shape, 1, "load+prefix", network_s=network_s)
    outcome = Simulation(deployment, arrivals(6000, load / step_ms * 1e3), 0).run()
    waits = [(job.first_s - job.due_s - 2 * network_s) * 1e3 - step_ms for job in outcome.jobs if job.first_s]
    assert len(waits) == 6000
    assert min(waits) == pytest.approx(0.0, abs=1e-6)
    assert np.mean(waits) == pytest.approx(load * step_ms / (2 * (1 - load)), rel=0.06)


@pytest.mark.slow
def test_the_more_a_policy_knows_of_loads_the_shorter_are_the_waits() -> None:
    shape = shape_of(LinearTimes(20.0, 0.0, 0.0), max_num_seqs=1, max_num_queued_requests=10_000)
    p99 = {
        policy: figures_of(arrivals(1500, 340.0), policy, 8, shape=shape).ttft_p99 or 0.0
        for policy in ("least-requests", "power-of-two", "random")
    }
    assert p99["least-requests"] < p99["power-of-two"] < p99["random"]


def test_prompts_with_a_known_beginning_find_it_with_our_policy() -> None:
    hits = {policy: figures_of(MIX.conversations(), policy).hit_rate for policy in ("load+prefix", "least-requests")}
    assert hits["load+prefix"] > hits["least-requests"] + 0.1


def test_routers_that_do_not_share_what_they_saw_need_sticky_clients() -> None:
    hits = [figures_of(MIX.conversations(), num_routers=4, is_sticky=sticky).hit_rate for sticky in (False, True)]
    assert hits[0] + 0.05 < hits[1]


def test_the_preference_counts() -> None:
    """With none, a request leaves the instance that knows its prompt for any that is emptier."""
    hits = [figures_of(MIX.conversations(), preference=value).hit_rate for value in (0.0, 4.0)]
    assert hits[0] < hits[1]


def test_a_recording_keeps_its_shared_beginnings(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "You help. " * 40},
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "an answer of some length"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "done"},
    ]
    path = tmp_path / "recording.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    chats = list(recorded(path, Mix(num_requests=5, rate=1.0, seed=0)))
    assert [len(chat.turns) for chat in chats] == [2, 2, 1]
    assert [turn.num_output for turn in chats[0].turns] == [6, 1]
    first, second = chats[0].turns[0].added, chats[1].turns[0].added
    assert (first[:100] == second[:100]).all()
    assert (first[100:] != second[100:]).all()


def test_a_trace_says_when_and_how_long(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = {"prompt_tokens": 40, "output_tokens": 4, "shared": "s", "shared_tokens": 32}
    lines = [
        {"time_s": 0.5, "conversation": "b", **first},
        {"time_s": 0.0, "conversation": "a", **first},
        {"time_s": 9.0, "conversation": "a", "prompt_tokens": 64, "output_tokens": 2},
        {"time_s": 0.0, "conversation": "c", **first, "shared": "another"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    a, c, b = traced(path, seed=0)
    assert [len(turn.added) for turn in a.turns] == [40, 20]
    assert (a.turns[0].added[:32] == b.turns[0].added[:32]).all()
    assert (a.turns[0].added[:32] != c.turns[0].added[:32]).any()
    outcome = Simulation(Deployment(shape_of(), 1, "load+prefix"), traced(path, seed=0), 0).run()
    assert [round(job.due_s, 3) for job in outcome.jobs] == [0.0, 0.0, 0.5, 9.0]
    assert outcome.num_hit_tokens == 32 + 32  # the shared text, and the whole blocks of the last turn's history
    path.write_text(json.dumps({"time_s": -1, "prompt_tokens": 4, "output_tokens": 4}))
    with pytest.raises(ConfigError, match=r"trace.jsonl:1: time_s: expected a number of at least 0, got -1"):
        list(traced(path, 0))


def test_the_command_prints_a_row_per_size_and_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--instances", "2,3", "--requests-per-instance", "6", "--output-len", "5", "--policies", "random"]
    assert main(["cluster", *options]) == 0
    assert capsys.readouterr().out.count("| random |") == 2
    assert main(["cluster", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["num_complete"] for entry in found] == [12, 18]
    assert list(found[0]) == [field.name for field in fields(Figures)]


def test_experts_by_load_are_more_even_than_consecutive_ones() -> None:
    first, second = SkewedExperts(4, 64, 1.0, 1 << 15, seed=0).windows()
    linear, packed, copied = balances(first, second, 8, [0, 16], num_tokens=64, top_k=4)
    assert linear.mean < packed.mean < copied.mean <= 1.0
    assert linear.rows_cost > packed.rows_cost > copied.rows_cost >= 1.0
    even = np.full((2, 64), 10.0)
    assert [found.mean for found in balances(even, even, 8, [0], 64, 4)] == [1.0, 1.0]
    hot = np.zeros((1, 8))
    hot[0, 3] = 80
    alone, copies = (balances(hot, hot, 4, [count], 8, 1)[1] for count in (0, 3))
    assert (alone.mean, round(copies.mean, 9)) == (0.25, 1.0)  # 4 ranks: the hot expert is on one, or on each


def test_counted_rows_come_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text("[[4, 0, 0, 0], [1, 1, 1, 1]]")
    assert main(["cluster", "--expert-counts", str(path), "--ranks", "2", "--redundant", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(of["mean"], of["worst"]) for of in found] == [(0.75, 0.5), (0.875, 0.75)]
    for wrong in ("[[1, 2], [1]]", "[[1, -2]]", "{}", "[", "[[1.5]]", "[]"):
        path.write_text(wrong)
        assert main(["cluster", "--expert-counts", str(path)]) == 2
        assert "expert_counts: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "0"], "rate: expected a number of at least 1e-06, got 0.0"),
        (["--deaths", "3", "--instances", "2"], "deaths: expected at most 2"),
        (["--policies", "randm"], "policies: expected some of"),
        (["--prefill-percent", "1"], "prefill_percent: expected at least one instance of either role"),
        (["--experts", "4", "--ranks", "8"], "ranks: expected at most as many as experts (4), got 8"),
        (["--profile", "nowhere.json"], "profile: expected a cost profile, got no file nowhere.json"),
    ],
)
def test_wrong_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_mix_has_as_many_requests_as_it_says() -> None:
    chats = list(MIX.conversations())
    assert sum(len(chat.turns) for chat in chats) == MIX.num_requests
    assert [chat.begin_s for chat in chats] == sorted(chat.begin_s for chat in chats)
    again = list(islice(MIX.conversations(), 3))
    assert all((x.turns[0].added == y.turns[0].added).all() for x, y in zip(chats, again, strict=False))
