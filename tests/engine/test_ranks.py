"""The promise over ranks: several processes give the bytes of one, whatever drafts and whatever fails on whom."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, open_engine, quick_variants, run_cell, standard_methods
from fastdeploy_sd.config import Config, ParallelConfig
from fastdeploy_sd.distributed import executor as ranks
from fastdeploy_sd.distributed.executor import MultiProcessExecutor
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest, InternalError
from fastdeploy_sd.llm import LLM
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Request, RequestId
from tests.doubles import faulty_rank_workers as faulty_followers
from tests.engine.models import References, fitted
from tests.engine.test_failing_rows import WAY, check, long_ones, run

pytestmark = pytest.mark.slow

NUM_REQUESTS = 24
# Chunks, prefix hits, preemption, all in turn.
WAYS = [quick_variants()[1], quick_variants()[4]]
METHODS = ["ngram", "mtp", "mixed", "auto-mtp"]


def on_ranks(base: Config, size: int) -> Config:
    """Slow steps of a busy machine are no hang."""
    return replace(base, parallel=ParallelConfig(tensor_parallel_size=size, rank_timeout_s=60.0))


def verify(
    references: References, model: str, size: int, method: str, way: EngineVariant, draft_p_min: float = 0.0
) -> None:
    reference = references.get(model)
    columns = [PLAIN] if method == "naive" else standard_methods([method], [3], model_method="mtp")
    columns = [replace(c, speculative=replace(c.speculative, draft_p_min=draft_p_min)) for c in columns]
    requests = reference.requests[: way.num_requests or NUM_REQUESTS]
    answers = {r.request_id: reference.answers[r.request_id] for r in requests}
    [column] = columns
    cell = run_cell(on_ranks(reference.base, size), fitted(way, model), column, requests, answers)
    assert (cell.difference, cell.missing) == (None, None), (way.name, column.name)


@pytest.mark.parametrize("method", ["naive", *METHODS])
def test_same_tokens_whatever_the_method(references: References, method: str) -> None:
    """The ways take turns: all that ranks are told of either is how many tokens of which rows a step has."""
    verify(references, "demo", 2, method, WAYS[["naive", *METHODS].index(method) % 2])


def test_same_tokens_where_improbable_drafts_end_a_chain(references: References) -> None:
    verify(references, "demo", 2, "mtp", WAYS[0], draft_p_min=0.4)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("demo", 4), ("wint8", 2), ("wint4", 4), ("int8 KV", 2), ("two MTP layers", 4), ("deepseek_v3-tiny", 2),
        ("gpt_oss-tiny", 2), ("qwen3_5-tiny", 4),
    ],
)  # fmt: skip
def test_same_tokens_whatever_the_number_of_ranks(references: References, model: str, size: int) -> None:
    """Greedy and seeded with penalties, bias and bad words, log-probabilities too: see cli/verify/requests.py.

    The bits of every architecture and format on two and on four ranks: tests/models/test_ranks.py.
    """
    verify(references, model, size, "mtp-ngram", WAYS[0])


# ---- what fails on one rank -----------------------------------------------------------------------------------------


@pytest.fixture
def culprits(
    references: References, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[RequestId]:
    """Requests that fail on rank 1, where the parameter says."""
    monkeypatch.setattr(ranks, "DEFAULT_RANK_WORKER", f"{faulty_followers.__name__}:{request.param}")
    found = long_ones(references.get("demo"), 2)
    monkeypatch.setenv(faulty_followers.CULPRITS, " ".join(found))
    return found


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("culprits", ["create_failing_model"], indirect=True)
@pytest.mark.parametrize("method", ["ngram", "mtp-ngram"])
def test_rows_that_fail_on_one_rank_end_and_the_others_get_their_bytes(
    references: References, culprits: list[RequestId], method: str
) -> None:
    reference = references.get("demo")
    [column] = standard_methods([method], [4])
    with open_engine(on_ranks(reference.base, 2), WAY, column) as engine:
        check(reference, run(engine, column.apply(reference.requests[:NUM_REQUESTS])), culprits)
        # Their table rows are free for others on every rank.
        again = [replace(r, request_id=f"{r.request_id}-again") for r in reference.requests[:NUM_REQUESTS]]
        transcript = run(engine, again)
        for r in reference.requests[:NUM_REQUESTS]:
            assert tuple(transcript.token_ids[f"{r.request_id}-again"]) == reference.answers[r.request_id].token_ids


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("culprits", ["create_failing_drafts"], indirect=True)
def test_draft_layers_that_fail_on_one_rank_cost_only_drafts(references: References, culprits: list[RequestId]) -> None:
    reference = references.get("demo")
    [column] = standard_methods(["mtp"], [4])
    with open_engine(on_ranks(reference.base, 2), WAY, column) as engine:
        transcript = run(engine, reference.requests[:NUM_REQUESTS])
        check(reference, transcript, ())
        drafted = {i: sum(last.metrics.drafts.drafted) for i, last in transcript.last.items() if last.metrics}
        assert all(drafted[i] == 0 for i in culprits)
        assert sum(count for i, count in drafted.items() if i not in culprits) > 0


@pytest.mark.usefixtures("expects_step_failures")
def test_a_failing_rank_0_leaves_the_others_in_step(references: References) -> None:
    """A fault of rank 0 alone, in its own part of a step: the others have run the attempt."""
    reference = references.get("demo")
    [column] = standard_methods(["mtp"], [4])
    with open_engine(on_ranks(reference.base, 2), WAY, column) as engine:
        runner = _first(engine)._runner  # type: ignore[attr-defined]
        real, count = runner._verifier.finish, iter(range(1 << 30))

        def finish(*args: object, **options: bool) -> object:
            if next(count) == 7:
                raise MemoryError("once")
            return real(*args, **options)

        runner._verifier.finish = finish
        check(reference, run(engine, reference.requests[:NUM_REQUESTS]), ())
        assert next(count) > 8


def _first(engine: Engine) -> object:
    executor = engine._executor
    assert isinstance(executor, MultiProcessExecutor)
    return executor._first


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_ends_or_hangs_inside_a_pass_ends_the_step(
    references: References, size: int, number: signal.Signals
) -> None:
    """The others wait for its part of a sum."""
    reference = references.get("demo")
    base = replace(reference.base, parallel=ParallelConfig(tensor_parallel_size=size, rank_timeout_s=2.0))
    [column] = standard_methods(["mtp"], [4])
    with open_engine(base, WAY, column) as engine:
        for request in reference.requests[:4]:
            engine.submit(request)
        for _ in range(3):
            engine.step()
        executor = engine._executor
        assert isinstance(executor, MultiProcessExecutor)
        doomed = executor._others._children[0]
        # Somewhere in the steps that follow, not between two of them.
        threading.Timer(0.02, doomed.signal, (number,)).start()
        with pytest.raises(InternalError, match="rank 1 "):
            run_for_ever(engine, reference.requests[:4])


def test_offline_generation_runs_on_ranks_too() -> None:
    params, prompts = SamplingParams(max_tokens=24, temperature=0.7, seed=3), ["def fib(n):", "import os"]
    texts = []
    for size in (1, 2):
        with LLM(model="demo", kv_cache_memory_gb=0.05, max_model_len=512, tensor_parallel_size=size) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


def run_for_ever(engine: Engine, requests: Sequence[Request]) -> None:
    while True:
        engine.step()
        for request in requests:
            with contextlib.suppress(BadRequest):  # it has not ended yet
                engine.submit(request)
