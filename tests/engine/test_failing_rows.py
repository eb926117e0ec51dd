"""A step that fails costs the requests that make it fail, and no other request a byte; then the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, Reference, open_engine, quick_variants, standard_methods
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode import dispatcher as router
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens, FinishReason, Request, RequestId, SchedulerOutput
from fastdeploy_sd.worker.step.runner import LaunchedStep, ModelRunner
from tests.doubles.engines import Transcript
from tests.engine.models import References, double

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("expects_step_failures")]

# Chunks, a prefix cache and preemption; prompts and outputs share steps.
WAY = replace(quick_variants()[1], num_blocks=24, num_requests=None)
NUM_REQUESTS = 20
ONE, SEVERAL = 1, 4
METHODS = ["naive", "ngram", "suffix", "mtp", "mtp-ngram", "mixed", "auto"]
# Where a step is made to fail: attribute of the runner, and method.
PHASES = {
    "batch": ("_batches", "build"),
    "forward": ("_forward", None),
    "verify": ("_verifier", "start"),
    "commit": ("_batches", "commit"),
}


def runner_of(engine: Engine) -> ModelRunner:
    runner: ModelRunner = engine._executor._runner  # type: ignore[attr-defined]
    return runner


@dataclass
class Fault:
    """Raises in some phase while one of the culprits is in the step; from their third output on, if `is_late`."""

    culprits: Sequence[RequestId]
    is_late: bool = True
    num_raised: int = 0

    def check(self, runner: ModelRunner, request_ids: Sequence[RequestId]) -> None:
        for request_id in self.culprits:
            if request_id in request_ids and self._is_due(runner, request_id):
                self.num_raised += 1
                raise ValueError("a kernel refused its arguments")

    def _is_due(self, runner: ModelRunner, request_id: RequestId) -> bool:
        [table_row] = runner._table.table_rows([request_id]).tolist()
        num_output = runner._table.num_tokens[table_row] - runner._table.rules[table_row].num_prompt_tokens
        return not self.is_late or num_output >= 3

    def install(self, runner: ModelRunner, phase: str) -> None:
        name, method = PHASES[phase]
        target = getattr(runner, name)
        real = target if method is None else getattr(target, method)

        running = note_requests(runner)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.check(runner, running)
            return real(*args, **kwargs)

        if method is None:
            setattr(runner, name, faulty)
        else:
            setattr(target, method, faulty)


def note_requests(runner: ModelRunner) -> list[RequestId]:
    """A list that holds the requests of the step, or part of one, that was launched last."""
    running, real = list[RequestId](), runner.launch

    def noted(plan: SchedulerOutput, *args: Any, **kwargs: Any) -> LaunchedStep:
        running[:] = plan.request_ids
        return real(plan, *args, **kwargs)

    setattr(runner, "launch", noted)  # noqa: B010 (mypy takes methods for constants)
    return running


def long_ones(reference: Reference, count: int) -> list[RequestId]:
    """Requests that a fault finds in the middle of their output."""
    found = [
        r.request_id for r in reference.requests[:NUM_REQUESTS] if len(reference.answers[r.request_id].token_ids) > 12
    ]
    assert len(found) >= 4
    return found[1 :: len(found) // 4][:count]


def method_named(name: str) -> Method:
    [method] = standard_methods([name], [4], model_method="mtp")
    return method


def run(engine: Engine, requests: Sequence[Request]) -> Transcript:
    transcript = Transcript()
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        transcript.add(engine.step())
        engine.check_integrity()
    return transcript


def check(reference: Reference, transcript: Transcript, failed: Sequence[RequestId]) -> None:
    """The failed ones end with an error and a part of their answer; the others have every byte of theirs."""
    for request in reference.requests[:NUM_REQUESTS]:
        request_id, last = request.request_id, transcript.last[request.request_id]
        expected = reference.answers[request_id]
        got = tuple(transcript.token_ids[request_id])
        if request_id in failed:
            assert last.finish_reason is FinishReason.ERROR
            assert last.error == ("InternalError", "the computation failed for this request")
            assert got == expected.token_ids[: len(got)]
            assert len(got) < len(expected.token_ids)
        else:
            assert (got, last.finish_reason) == (expected.token_ids, expected.finish_reason)


@pytest.fixture
def reference(references: References) -> Reference:
    return references.get("qwen3-tiny")


@contextmanager
def opened(reference: Reference, method: str, way: EngineVariant = WAY) -> Iterator[tuple[Engine, list[Request]]]:
    column = method_named(method)
    with open_engine(reference.base, way, column) as engine:
        yield engine, column.apply(reference.requests[:NUM_REQUESTS])


@pytest.mark.parametrize("count", [ONE, SEVERAL])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method", METHODS)
def test_only_the_culprits_of_a_failing_step_end(reference: Reference, method: str, phase: str, count: int) -> None:
    culprits = long_ones(reference, count)
    with opened(reference, method) as (engine, requests):
        fault = Fault(culprits)
        fault.install(runner_of(engine), phase)
        transcript = run(engine, requests)
        check(reference, transcript, culprits)
        assert fault.num_raised > len(culprits)
        stats = engine.stats()
        assert stats.num_finished["error"] == len(culprits)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.mark.parametrize("phase", ["forward", "verify"])
def test_an_engine_whose_rows_all_fail_goes_on_with_the_next_requests(reference: Reference, phase: str) -> None:
    with opened(reference, "mtp") as (engine, requests):
        fault = Fault([r.request_id for r in requests], is_late=False)
        fault.install(runner_of(engine), phase)
        check(reference, run(engine, requests), fault.culprits)
        fault.culprits = ()
        check(reference, run(engine, requests), ())


def test_a_step_that_fails_for_its_size_is_run_in_parts(reference: Reference) -> None:
    with opened(reference, "mtp-ngram") as (engine, requests):
        runner = runner_of(engine)
        real, sizes, running = runner._forward, list[int](), note_requests(runner)

        def too_small() -> None:
            sizes.append(len(running))
            if len(running) > 2:
                raise MemoryError("no room for so many rows")
            real()

        setattr(runner, "_forward", too_small)  # noqa: B010 (it lacks the results, which are bound already)
        check(reference, run(engine, requests), ())
        assert max(sizes) > 4


class FailingMethod:
    """A real method that raises for some requests, before or after it has worked."""

    def __init__(self, method: Proposer, culprits: Sequence[RequestId], where: str) -> None:
        self._method, self._culprits, self._where = method, culprits, where

    @property
    def num_lookahead_slots(self) -> int:
        return self._method.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._method.begin(requests)
        if self._where == "begin":
            self._check([r.request_id for r in requests])

    def propose(self, x: ProposeInput) -> DraftTokens:
        # A method looks at rows of others only to keep them out.
        if self._where == "propose" and (x.num_tokens % 3 == 0).any():
            self._check([i for i, n in zip(x.request_ids, x.num_tokens.tolist(), strict=True) if n % 3 == 0])
        return self._method.propose(x)

    def forget(self, table_rows: I32) -> None:
        self._method.forget(table_rows)

    def close(self) -> None:
        self._method.close()

    def _check(self, request_ids: Sequence[RequestId]) -> None:
        if not set(self._culprits).isdisjoint(request_ids):
            raise RuntimeError("a method that fails")


@pytest.mark.parametrize("count", [ONE, SEVERAL])
@pytest.mark.parametrize("where", ["begin", "propose"])
@pytest.mark.parametrize("method", METHODS[1:])
def test_a_request_that_cannot_be_drafted_for_goes_on_without(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, method: str, where: str, count: int
) -> None:
    culprits = long_ones(reference, count)

    def create(name: str, *args: Any) -> Proposer:
        made = create_method(name, *args)
        # Those that `auto` chooses from are parts of it.
        return made if method == "auto" != name else FailingMethod(made, culprits, where)

    monkeypatch.setattr(router, "create_method", create)
    with opened(reference, method) as (engine, requests):
        transcript = run(engine, requests)
        check(reference, transcript, ())
        drafted = {i: sum(last.metrics.drafts.drafted) for i, last in transcript.last.items() if last.metrics}
        assert sum(count for i, count in drafted.items() if i not in culprits) > 0
        if where == "begin" and "-" not in method:  # a hybrid's other method goes on
            assert all(drafted[i] == 0 for i in culprits)
        # Nothing of the lost ones is left for those who come to their table rows.
        again = [replace(r, request_id=f"{r.request_id}-again") for r in requests]
        transcript = run(engine, again)
        assert all(
            tuple(transcript.token_ids[f"{r.request_id}-again"]) == reference.answers[r.request_id].token_ids
            for r in requests
        )


def test_mtp_passes_that_fail_when_all_is_written_are_done_again(references: References) -> None:
    """The drafts of the others are those of an undisturbed run, too."""
    reference = references.get("demo")
    num_accepted = []
    roomy = replace(WAY, num_blocks=512)  # or how many drafts a request may have depends on what others leave
    [culprit] = long_ones(reference, 1)
    for culprits in ((), (culprit,)):
        with opened(reference, "mtp", roomy) as (engine, requests):
            guard = next(iter(runner_of(engine)._drafting._guard.method._made.values()))  # type: ignore[attr-defined]
            mtp = guard.method
            real = mtp._passes.run

            def failing(step: Any, *, wants_logits: bool, mtp: Any = mtp, real: Any = real, ids: Any = culprits) -> Any:
                found = real(step, wants_logits=wants_logits)
                table_rows = mtp_rows(engine, ids)
                if not table_rows.isdisjoint(step.batch.table_rows.tolist()):
                    raise RuntimeError("a pass failed")
                return found

            mtp._passes.run = failing
            transcript = run(engine, requests)
            check(reference, transcript, ())
            metrics = {i: last.metrics for i, last in transcript.last.items()}
            num_accepted.append({i: m.drafts for i, m in metrics.items() if m and i != culprit})
    assert num_accepted[0] == num_accepted[1]


def mtp_rows(engine: Engine, request_ids: Sequence[RequestId]) -> set[int]:
    known = runner_of(engine)._table._table_row_of
    return {known[i] for i in request_ids if i in known}


def bypassed(sampling: SamplingParams, **values: Any) -> SamplingParams:
    """Values as only a broken frontend can have them."""
    copied = replace(sampling)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"top_p": 1e-50}, "top_p"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 2**40}, "top_k"),
        ({"stop_token_ids": (4096,), "min_tokens": 1}, "stop_token_ids"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias"),
    ],
)
def test_a_request_whose_columns_break_a_rule_fails_alone(
    reference: Reference, values: dict[str, Any], field: str
) -> None:
    with opened(reference, "mtp-ngram") as (engine, requests):
        engine._scheduler._rules.verify = lambda request: None  # type: ignore[method-assign]
        requests[7] = replace(requests[7], sampling=bypassed(requests[7].sampling, **values))
        transcript = run(engine, requests)
        error = transcript.last["r7"].error
        assert error is not None
        assert error[0] == "BadRequest"
        assert error[1].startswith(f"{field}: expected ")
        assert transcript.token_ids["r7"] == []
        others = replace(
            reference, requests=tuple(r for r in reference.requests[:NUM_REQUESTS] if r.request_id != "r7")
        )
        check(others, transcript, ())


def test_drafts_outside_the_vocabulary_cost_their_request_only(reference: Reference) -> None:
    [culprit] = long_ones(reference, 1)
    right = {i: [*r.prompt_token_ids.tolist(), *a.token_ids, *[5] * 200] for r, (i, a) in zip(
        reference.requests, reference.answers.items(), strict=True
    )}  # fmt: skip
    method = double("oracle", 4, {**right, culprit: [4096] * 512})
    way = replace(WAY, enable_prefix_caching=False)
    with open_engine(reference.base, way, method) as engine:
        transcript = run(engine, reference.requests[:NUM_REQUESTS])
        check(reference, transcript, [culprit])
        assert engine.stats().num_accepted_tokens > 0


def test_the_same_step_with_and_without_a_failure_leaves_the_same_kv(reference: Reference) -> None:
    """What the others leave in the prefix cache serves requests that come later, bit for bit."""
    with opened(reference, "naive", replace(WAY, num_blocks=512)) as (engine, requests):
        fault = Fault(long_ones(reference, 4))
        fault.install(runner_of(engine), "verify")
        run(engine, requests)
        fault.culprits = ()
        transcript = run(engine, requests)
        check(reference, transcript, ())
        assert sum(last.num_cached_tokens for last in transcript.last.values()) > 0
