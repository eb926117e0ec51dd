"""The promise where experts are spread over ranks: the bytes of one process, whatever drafts and batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, Method, compare, quick_variants, standard_methods
from fastdeploy_sd.cli.verify.answers import Answer, AnswerCollector
from fastdeploy_sd.cli.verify.runs import Reference, engine_config, make_reference, open_engine, run, run_alone
from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.device.expert_service import ExpertService, expert_segment
from fastdeploy_sd.distributed.executor import KvExecutor, MultiProcessExecutor, start_ranks
from fastdeploy_sd.distributed.expert_monitor import ExpertMonitor
from fastdeploy_sd.distributed.expert_planner import ExpertPlanner
from fastdeploy_sd.distributed.process import DEFAULT_RANK_WORKER
from fastdeploy_sd.distributed.starting import expert_place
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest, InternalError
from fastdeploy_sd.models.sharding import linear_experts, spread_experts
from fastdeploy_sd.types import Request, RequestId
from fastdeploy_sd.worker.executor import create_executor as create_rank
from fastdeploy_sd.worker.ranks.rank_group import RankGroup
from tests.engine.models import References, fitted
from tests.engine.test_failing_rows import WAY as LONG_WAY
from tests.engine.test_ranks import run_for_ever
from tests.engine.test_swap import WAY as SWAPPING

pytestmark = pytest.mark.slow

NUM_REQUESTS = 24
# Chunks, prefix hits and preemption.
WAY = quick_variants()[1]


@contextlib.contextmanager
def open_engines(
    base: Config,
    way: EngineVariant,
    method: Method,
    num_engines: int,
    size: int,
    eplb: EplbConfig | None = None,
) -> Iterator[list[Engine]]:
    """Load engines of so many ranks each in this process. While one runs a step, the others' services run experts."""
    parallel = ParallelConfig(
        tensor_parallel_size=size,
        data_parallel_size=num_engines,
        enable_expert_parallel=True,
        enable_eplb=eplb is not None,
        eplb_config=eplb,
        rank_timeout_s=60.0,
    )
    base = engine_config(replace(base, parallel=parallel), way, method)
    configs = [replace(base, parallel=replace(parallel, local_data_parallel_id=d)) for d in range(num_engines)]
    num_threads = library.num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(library.set_num_threads, num_threads)
        file = expert_segment()
        stack.callback(os.close, file)
        engines = []
        for config in configs:
            executor = start(config, method, file)
            stack.callback(executor.shutdown)
            engines.append(Engine(config, executor))
        yield engines


def start(config: Config, method: Method, file: int) -> KvExecutor:
    """Load one engine without waiting for the others."""

    def load(config: Config, group: RankGroup) -> KvExecutor:
        return create_rank(config, method.make_proposer, group)

    if config.parallel.tensor_parallel_size > 1:
        return start_ranks(config, load, DEFAULT_RANK_WORKER, file)
    return load(config, RankGroup(expert_place=expert_place(config.parallel, 0, file)))


def split(requests: Sequence[Request], num_engines: int) -> list[list[Request]]:
    """Share requests out unevenly: the first engine has at least three of four."""
    parts: list[list[Request]] = [[] for _ in range(num_engines)]
    for i, request in enumerate(requests):
        parts[i // 4 % num_engines if i % 4 == 3 else 0].append(request)
    return parts


def answers_of(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    arrivals_per_step: int = 3,
    between: Callable[[], object] = lambda: None,
) -> Mapping[RequestId, Answer]:
    """Let the engines take turns until all requests have ended, and `between` happen after each turn."""
    collector, pending = AnswerCollector(), split(requests, len(engines))
    while any(pending) or any(engine.has_work() for engine in engines):
        for engine, own in zip(engines, pending, strict=True):
            for request in own[:arrivals_per_step]:
                engine.submit(request)
            del own[:arrivals_per_step]
            for output in engine.step() if engine.has_work() else ():
                collector.add(output)
            engine.check_integrity()
        between()
    return {r.request_id: collector.answer(r.request_id) for r in requests}


def method_of(name: str) -> Method:
    if name == "naive":
        return PLAIN
    [method] = standard_methods([name], [3], model_method="mtp")
    return method


@pytest.fixture(scope="module")
def guided(references: References) -> Callable[[str], Reference]:
    """Greedy and seeded requests with everything that sampling has, and with grammars; log-probabilities too."""

    def make(model: str) -> Reference:
        reference = make_reference(references.base(model), seed=5, count=NUM_REQUESTS, has_guided=True)
        assert not reference.unguided
        return reference

    return functools.cache(make)


@pytest.mark.parametrize(
    ("model", "num_engines", "size", "method"),
    [
        *itertools.product(["ernie4_5_moe-tiny", "seven experts"], [2], [1], ["naive", "mtp-ngram", "auto-mtp"]),
        ("seven experts", 3, 1, "mtp-ngram"),  # of eight experts two or three each
        ("ernie4_5_moe-tiny", 1, 2, "auto-mtp"),
        ("seven experts", 1, 2, "mtp-ngram"),
        ("seven experts", 2, 2, "mtp-ngram"),
    ],
)
def test_same_tokens_whatever_the_ranks(
    guided: Callable[[str], Reference], model: str, num_engines: int, size: int, method: str
) -> None:
    reference, column = guided(model), method_of(method)
    with open_engines(reference.base, fitted(WAY, model), column, num_engines, size) as engines:
        answers = answers_of(engines, column.apply(reference.requests))
        assert compare(reference.answers, answers) is None
        assert_all_served(engines[0])


@pytest.mark.parametrize(
    "model",
    [
        "glm4_moe-tiny", "gpt_oss-tiny", "deepseek_v3-tiny", "qwen3_5_moe-tiny", "qwen3_next-tiny", "wint8", "wint4",
    ],
)  # fmt: skip
def test_same_tokens_of_every_family_and_format(references: References, model: str) -> None:
    reference, column = references.get(model), method_of("mtp-ngram")
    requests = reference.requests[:NUM_REQUESTS]
    with open_engines(reference.base, fitted(WAY, model), column, 2, 1) as engines:
        answers = answers_of(engines, column.apply(requests))
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, answers) is None
        assert_all_served(engines[0])


def random_moves(service: ExpertService, num_redundant: int) -> tuple[Callable[[], None], set[bytes]]:
    """Return what moves experts of all layers to random goals, a little with each call, and where they have been."""
    planner, rng, seen = ExpertPlanner(service, num_redundant, interval_s=1.0), random.Random(7), set[bytes]()

    def move() -> None:
        if not planner.follow():
            for layer, what in service.layers.items():
                names = rng.sample(range(what.num_experts), what.num_experts)
                first = spread_experts(what.num_experts, service.shape.num_ranks, num_redundant)
                planner.seek(layer, [{names[expert] for expert in own} for own in first])
        seen.update(service.placement(layer).tobytes() for layer in service.layers)
        time.sleep(0.01)

    return move, seen


@pytest.mark.parametrize(
    ("model", "num_engines", "size", "num_redundant"),
    [("seven experts", 2, 1, 0), ("seven experts", 2, 1, 3), ("ernie4_5_moe-tiny", 1, 2, 2)],
)
def test_same_tokens_while_experts_move(
    guided: Callable[[str], Reference], model: str, num_engines: int, size: int, num_redundant: int
) -> None:
    reference, method = guided(model), method_of("mtp-ngram")
    eplb = EplbConfig(redundant_experts_num=num_redundant)
    with open_engines(reference.base, fitted(WAY, model), method, num_engines, size, eplb) as engines:
        move, seen = random_moves(experts_of(engines[0]), num_redundant)
        answers = answers_of(engines, method.apply(reference.requests), between=move)
        assert compare(reference.answers, answers) is None
        assert len(seen) > 20


def test_experts_are_placed_anew_when_asked(guided: Callable[[str], Reference]) -> None:
    """What engines tell meanwhile: rows of ranks and experts, moves, and when these are done."""
    reference, eplb = guided("seven experts"), EplbConfig(redundant_experts_num=1)
    requests = reference.requests[:12]
    with open_engines(reference.base, fitted(WAY, "seven experts"), PLAIN, 2, 1, eplb) as engines:
        service = experts_of(engines[0])
        planner = ExpertPlanner(service, 1, interval_s=1e9)
        monitors = [ExpertMonitor(experts_of(engines[0]), range(1), planner)]
        monitors.append(ExpertMonitor(experts_of(engines[1]), range(1, 2), None))
        for engine, monitor in zip(engines, monitors, strict=True):
            engine.experts = monitor
        answers = answers_of(engines, requests)
        assert compare({r.request_id: reference.answers[r.request_id] for r in requests}, answers) is None
        stats = [engine.stats().experts for engine in engines]
        assert stats[0] is not None
        assert stats[1] is not None
        rows = monitors[1].report(clears=True).num_rows
        served = {**stats[0].num_rows, **stats[1].num_rows}
        assert [sum(of_layer) for of_layer in rows] == np.sum([served[0], served[1]], axis=0).tolist()
        loads = np.array([served[0], served[1]], np.float64)
        assert stats[0].balancedness == {i: column.mean() / column.max() for i, column in enumerate(loads.T)}
        assert (stats[0].num_moves, stats[0].num_moving, stats[1].balancedness) == (0, 0, {})
        assert sum(map(sum, monitors[1].report().num_rows)) == 0
        before = monitors[0].report()
        with pytest.raises(BadRequest, match="expected at the server of the first engine"):
            monitors[1].rearrange()
        monitors[0].rearrange()
        assert monitors[0].report().is_moving
        with pytest.raises(BadRequest, match="expected when experts do not move") as told:
            monitors[0].rearrange()
        assert told.value.code == "rearranging"
        planner.start()
        deadline = time.monotonic() + 60
        while (after := monitors[0].report()).is_moving:
            assert time.monotonic() < deadline, "experts move for ever"
            time.sleep(0.01)
        assert after.is_reached == (True, True)
        assert after.placement != before.placement
        moved = monitors[0].stats()
        assert moved.num_moves > 0
        assert moved.num_moving == 0
        assert compare(answers, answers_of(engines, requests)) is None


def test_engines_do_what_they_like(guided: Callable[[str], Reference]) -> None:
    """One is idle, then in a long prompt, while another runs, aborts, and fetches blocks from its second level."""
    reference, method = guided("seven experts"), method_of("mtp-ngram")
    base = replace(reference.base, cache=replace(reference.base.cache, swap_space=0.05))
    prompt = np.concatenate([r.prompt_token_ids for r in reference.requests])[:400]
    long = replace(reference.requests[0], request_id="long", prompt_token_ids=prompt, max_tokens=8)
    expected = {**reference.answers, **run_alone(reference.base, [long])}
    way = replace(SWAPPING, long_prefill_token_threshold=16, num_blocks=40)
    with open_engines(base, way, method, 2, 1) as [first, second]:
        idle = [*reference.requests[:12]]
        assert compare({r.request_id: expected[r.request_id] for r in idle}, run(first, idle, 2)) is None
        assert not second.has_work()
        collector = AnswerCollector()
        second.submit(long)
        for request in reference.requests:
            first.submit(request)
        aborted = {"r3", "r11", "r20"}
        for step in itertools.count():
            if step == 5:
                first.abort(sorted(aborted))
            working = [engine for engine in (first, second) if engine.has_work()]
            for engine in working:
                for output in engine.step():
                    collector.add(output)
                engine.check_integrity()
            if not working:
                break
        finished = [i for i in expected if i not in aborted]
        assert compare({i: expected[i] for i in finished}, {i: collector.answer(i) for i in finished}) is None
        assert first.stats().swap.num_loaded > 0


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_ends_the_step(guided: Callable[[str], Reference], number: signal.Signals) -> None:
    """Rank 0 waits for its experts or for its part of a sum."""
    reference = guided("seven experts")
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, rank_timeout_s=2.0)
    with open_engine(replace(reference.base, parallel=parallel), LONG_WAY, PLAIN) as engine:
        for request in reference.requests[:4]:
            engine.submit(request)
        engine.step()
        executor = engine._executor
        assert isinstance(executor, MultiProcessExecutor)
        threading.Timer(0.02, executor._others._children[0].signal, (number,)).start()
        with pytest.raises(InternalError, match="rank 1 "):
            run_for_ever(engine, reference.requests[:4])


def experts_of(engine: Engine) -> ExpertService:
    """The service of an engine's rank 0."""
    experts: ExpertService = engine._executor.experts  # type: ignore[attr-defined]
    return experts


def assert_all_served(engine: Engine) -> None:
    """Every rank has run experts of every layer, of draft layers too."""
    experts = experts_of(engine)
    rows = experts.counts()
    for layer, counts in enumerate(rows):
        for own in linear_experts(len(counts), experts.shape.num_ranks):
            assert counts[own.start : own.stop].sum() > 0, (layer, own)
