"""Models with recurrent states: what only they do with drafts, grammars, failing steps and options."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import Reference, compare, open_engine, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import run, run_alone
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig, SplitwiseConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import FinishReason
from fastdeploy_sd.worker.autotune.cost_measurement import measure_costs
from fastdeploy_sd.worker.executor import create_executor
from fastdeploy_sd.worker.loading.forecast import forecast
from fastdeploy_sd.worker.step import guided_rows
from tests.engine.guided_requests import KINDS
from tests.engine.models import References
from tests.engine.test_exactness import OTHER_WAYS, TIGHT_WAYS
from tests.engine.test_failing_rows import NUM_REQUESTS, WAY, Fault, long_ones, method_named, runner_of
from tests.engine.test_failing_rows import run as run_all
from tests.models import golden

pytestmark = pytest.mark.slow

NAME = "qwen3_5-tiny"
MODEL = str(golden.ROOT / NAME)


@pytest.mark.parametrize("num_drafts", [1, 7, 16])
@pytest.mark.parametrize("model", [NAME, "qwen3_next-tiny"])
def test_drafts_are_rejected_at_every_place_of_a_chain(references: References, model: str, num_drafts: int) -> None:
    """Half of the rows have the first drafts right, in chunks, with prefix hits and preemption."""
    reference = references.get(model)
    way, method = TIGHT_WAYS[num_drafts % 2], references.double(model, "random", num_drafts)
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert 0 < cell.num_accepted < cell.num_drafts


@pytest.fixture(scope="module")
def guided(references: References) -> Reference:
    plain = references.get(NAME)
    requests = tuple(
        replace(r, grammar=KINDS[i % len(KINDS)].grammar if i % 3 else "", eos_token_ids=(2,))
        for i, r in enumerate(plain.requests[:18])
    )
    return Reference(plain.base, requests, run_alone(plain.base, requests))


@pytest.mark.parametrize(("name", "k"), [("naive", 1), ("ngram", 9), ("mtp-ngram", 4)])
def test_a_held_request_runs_its_newest_token_again(
    guided: Reference, name: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = random.Random(k)
    monkeypatch.setattr(guided_rows, "share_s", lambda num_requests: choice.choice([0.0, 1.0, 1.0]))
    [method] = standard_methods([name], [k], model_method="mtp")
    with open_engine(guided.base, OTHER_WAYS[1], method) as engine:
        answers = run(engine, method.apply(guided.requests), 3)
        stats = engine.stats().grammars
    assert compare(guided.answers, answers) is None
    assert min(stats.num_masks, stats.num_late_masks) > 20


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("phase", ["batch", "forward", "verify"])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(references: References, phase: str) -> None:
    """Those whose states it may have changed; every byte that anyone gets is right."""
    reference, method = references.get(NAME), method_named("mtp-ngram")
    requests = method.apply(reference.requests[:NUM_REQUESTS])
    fault = Fault(long_ones(reference, 1))
    with open_engine(reference.base, WAY, method) as engine:
        fault.install(runner_of(engine), phase)
        transcript = run_all(engine, requests)
        ended = 0
        for request in requests:
            name, answer = request.request_id, reference.answers[request.request_id]
            got, is_failed = (
                tuple(transcript.token_ids[name]),
                transcript.last[name].finish_reason is FinishReason.ERROR,
            )
            assert got == answer.token_ids[: len(got)]
            assert is_failed or got == answer.token_ids
            assert is_failed or name not in fault.culprits
            ended += is_failed
        assert ended == (1 if phase == "batch" else ended) < len(requests)
        fault.culprits = ()
        for name, tokens in run_all(engine, requests).token_ids.items():
            assert tuple(tokens) == reference.answers[name].token_ids


def test_costs_are_measured_and_leave_no_trace() -> None:
    config = Config(
        ModelConfig(MODEL, max_model_len=256),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
        speculative=SpeculativeConfig("ngram", num_speculative_tokens=4),
    )
    executor = create_executor(config)
    try:
        costs = measure_costs(executor.execute, executor.model_info, 4, 128, 60.0)
        assert {(1, 64, 1), (1, 64, 5), (4, 64, 20)} <= {(s.requests, s.context, s.rows) for s in costs.steps}
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculative": SpeculativeConfig("ngram", draft_trees=True)},
            "speculative_config.draft_trees: expected false",
        ),
        (
            {"splitwise": SplitwiseConfig(splitwise_role="prefill"), "cache": CacheConfig(swap_space=1.0)},
            "swap_space: expected none with splitwise_role prefill for a model with recurrent states",
        ),
        (
            {"splitwise": SplitwiseConfig(splitwise_role="prefill"), "cache": CacheConfig(num_state_snapshots=0)},
            "num_state_snapshots: expected room for states that are sent, with splitwise_role prefill for a model",
        ),
        (
            {"splitwise": SplitwiseConfig(splitwise_role="decode"), "cache": CacheConfig(enable_prefix_caching=False)},
            "enable_prefix_caching: expected room for states that are sent, with splitwise_role decode for a model",
        ),
    ],
)
def test_what_states_cannot_do_is_refused_by_its_option(options: dict[str, object], message: str) -> None:
    config = Config(ModelConfig(MODEL), **options)  # type: ignore[arg-type]
    for start in (forecast, create_executor):
        with pytest.raises(ConfigError, match=message) as raised:
            start(config)
        assert raised.value.param in {
            "speculative_config",
            "swap_space",
            "num_state_snapshots",
            "enable_prefix_caching",
        }


def test_more_snapshots_than_memory_are_refused_by_their_option() -> None:
    with pytest.raises(ConfigError, match="num_state_snapshots, max_num_seqs: expected what the") as raised:
        create_executor(Config(ModelConfig(MODEL), cache=CacheConfig(num_state_snapshots=10**12)))
    assert raised.value.param == "num_state_snapshots"


def test_a_model_without_states_has_no_snapshots_to_set() -> None:
    config = Config(ModelConfig(str(golden.ROOT / "qwen3-tiny")), cache=CacheConfig(num_state_snapshots=5))
    for start in (forecast, create_executor):
        with pytest.raises(ConfigError, match="expected none for a model without recurrent states, got 5") as raised:
            start(config)
        assert raised.value.param == "num_state_snapshots"


def test_a_model_with_states_is_no_draft_model() -> None:
    speculative = SpeculativeConfig("draft_model", model=MODEL)
    config = Config(ModelConfig(str(golden.ROOT / "qwen3-tiny")), speculative=speculative)
    with pytest.raises(ConfigError, match="model: expected a draft model without recurrent states") as raised:
        create_executor(config)
    assert raised.value.param == "speculative_config"


def test_the_forecast_tells_what_states_take() -> None:
    lines = forecast(Config(ModelConfig(MODEL), cache=CacheConfig(num_state_snapshots=5)))
    assert lines["recurrent states"].startswith("32 requests of 0.0")
    assert "and 5 snapshots" in lines["recurrent states"]
