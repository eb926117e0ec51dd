"""What the MTP proposer does with rows that are not its own, broken logits, and requests for log-probabilities."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.drafters.draft_layers import DraftLayers
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.model_based.proposer import ModelProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext, TargetStep
from fastdeploy_sd.types import DraftTokens, Speculation
from fastdeploy_sd.worker.executor import create_executor
from tests.models.mtp_models import MtpReference, make_model
from tests.models.mtp_runs import BLOCK_SIZE, make_engine, make_requests, run

pytestmark = pytest.mark.slow

NAME, NUM_STEPS = "ernie4_5-tiny", 3


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MtpReference:
    return make_model(tmp_path_factory.mktemp("mtp"), NAME, "ernie-folder")


@pytest.fixture
def proposer(reference: MtpReference) -> ModelProposer:
    return make_proposer(reference, enable_draft_logprob=True)


def make_proposer(reference: MtpReference, num_steps: int = NUM_STEPS, **options: float) -> ModelProposer:
    """As a server has it, without the engine."""
    _, recorder = make_engine(str(reference.path), num_steps, **options)  # type: ignore[arg-type]
    router = recorder.proposer.method  # type: ignore[attr-defined]
    made = router._method(router._configured).method
    assert isinstance(made, ModelProposer)
    return made


def step(
    reference: MtpReference, proposer: ModelProposer, num_rows: int, wanted: list[int] | None = None
) -> ProposeInput:
    """Prompts of five tokens, just run, each with its first output token."""
    rng = np.random.default_rng(5)
    model = proposer._model
    table = model.token_table
    table[:] = rng.integers(4, 4096, table.shape)
    table_rows = np.arange(num_rows, dtype=np.int32)[::-1].copy()
    hidden = np.concatenate([reference.hidden(table[row, :5]) for row in table_rows])
    model.hidden[: len(hidden)] = paddle.to_tensor(hidden)  # type: ignore[assignment, index]
    model.block_table[:, 0] = np.arange(len(table))
    columns = {name: np.full(num_rows, value, np.int32) for name, value in (("zero", 0), ("five", 5), ("six", 6))}
    return ProposeInput(
        request_ids=tuple(f"r{row}" for row in table_rows),
        table_rows=table_rows,
        token_table=table,
        num_tokens=columns["six"],
        max_draft_len=np.full(num_rows, NUM_STEPS, np.int32),
        num_draft_logprobs=None if wanted is None else np.array(wanted, np.int32),
        target=TargetStep(
            query_start_loc=np.arange(num_rows + 1, dtype=np.int32) * 5,
            num_computed_tokens=columns["zero"],
            num_valid=columns["five"],
            num_kv_slots=np.full(num_rows, BLOCK_SIZE, np.int32),
        ),
    )


def begin(proposer: ModelProposer, *table_rows: int) -> None:
    proposer.begin([DraftRequest(f"r{row}", row, 5, 5) for row in table_rows])


def wanted_drafts(reference: MtpReference, x: ProposeInput, r: int) -> list[int]:
    text = x.token_table[x.table_rows[r], : x.num_tokens[r]]
    return reference.drafts(text, NUM_STEPS, reference.hidden(text[:-1])).token_ids.tolist()


def test_rows_of_others_and_failed_rows_get_nothing_and_disturb_nobody(
    reference: MtpReference, proposer: ModelProposer
) -> None:
    x = step(reference, proposer, 4)
    assert x.target is not None
    begin(proposer, 0, 2, 3)  # row 1 belongs to another method
    failed = x.target.num_valid.copy()
    failed[1] = 0  # row 2
    drafts = proposer.propose(replace(x, target=replace(x.target, num_valid=failed)))
    assert np.diff(drafts.cu_num_draft).tolist() == [3, 0, 0, 3]
    assert drafts.row(0).tolist() == wanted_drafts(reference, x, 0)
    assert drafts.row(3).tolist() == wanted_drafts(reference, x, 3)
    proposer.forget(x.table_rows)
    assert len(proposer.propose(x).token_ids) == 0


def test_limits_are_kept_and_drafted_rows_not_extended(reference: MtpReference, proposer: ModelProposer) -> None:
    x = step(reference, proposer, 4)
    begin(proposer, 0, 1, 2, 3)
    prefix = DraftTokens(np.array([7], np.int32), np.array([0, 0, 0, 0, 1], np.int32))
    limits = np.array([2, 0, 9, 3], np.int32)
    drafts = proposer.propose(replace(x, max_draft_len=limits, prefix=prefix))
    assert np.diff(drafts.cu_num_draft).tolist() == [2, 0, NUM_STEPS, 0]
    assert drafts.row(0).tolist() == wanted_drafts(reference, x, 0)[:2]


@pytest.mark.parametrize("num_layers", [1, NUM_STEPS])
def test_a_draft_without_a_largest_logit_ends_its_row(
    num_layers: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after a failed draft runs something in its place, in the same layer or in the next."""
    reference = make_model(tmp_path, NAME, "ernie-folder", num_layers)
    proposer = make_proposer(reference, enforce_eager=True, enable_draft_logprob=True)
    x = step(reference, proposer, 3, [2, 2, 2])
    begin(proposer, 0, 1, 2)
    sound = DraftLayers.logits
    calls: list[int] = []

    def broken(self: DraftLayers, layer: int, normed: Any) -> Any:
        logits: Any = sound(self, layer, normed)
        calls.append(layer)
        if len(calls) == 2:
            logits[1, 9] = float("nan")
        return logits

    monkeypatch.setattr(DraftLayers, "logits", broken)
    drafts = proposer.propose(x)
    assert np.diff(drafts.cu_num_draft).tolist() == [3, 1, 3]
    for r in range(3):
        assert drafts.row(r).tolist() == wanted_drafts(reference, x, r)[: len(drafts.row(r))]
    assert drafts.logprobs is not None
    assert np.isfinite(drafts.logprobs.logprobs).all()
    assert len(drafts.logprobs.ranks) == 7


@pytest.mark.parametrize("num_layers", [1, NUM_STEPS])
@pytest.mark.parametrize("quantile", [0.2, 0.5])
def test_a_row_ends_before_its_first_improbable_draft(num_layers: int, quantile: float, tmp_path: pathlib.Path) -> None:
    reference = make_model(tmp_path, NAME, "ernie-folder", num_layers)
    x = step(reference, make_proposer(reference), 4, [0] * 4)
    texts = [x.token_table[row, :6] for row in x.table_rows]
    probs = np.array([[np.exp(p.max()) for p in reference.logprobs(t, 3, reference.hidden(t[:-1]))] for t in texts])
    # Between two of them, so that rounding does not decide.
    ordered = np.sort(probs, axis=None)
    at = int(quantile * len(ordered))
    draft_p_min = float(ordered[at : at + 2].mean())
    want = [int(np.append(row < draft_p_min, True).argmax()) for row in probs]
    assert len(set(want)) > 1
    proposer = make_proposer(reference, enable_draft_logprob=True, draft_p_min=draft_p_min)
    x = step(reference, proposer, 4, [0] * 4)
    begin(proposer, 0, 1, 2, 3)
    drafts = proposer.propose(x)
    assert np.diff(drafts.cu_num_draft).tolist() == want
    for r in range(4):
        assert drafts.row(r).tolist() == wanted_drafts(reference, x, r)[: want[r]]
    assert drafts.logprobs is not None
    kept = np.concatenate([row[:n] for row, n in zip(probs, want, strict=True)])
    np.testing.assert_allclose(np.exp(drafts.logprobs.logprobs), kept, rtol=1e-3)


def test_no_pass_is_run_for_drafts_behind_an_improbable_one(
    reference: MtpReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make_proposer(reference, enforce_eager=True, draft_p_min=1.0)
    x = step(reference, proposer, 2)
    begin(proposer, 0, 1)
    num_passes, sound = list[int](), DraftLayers.forward

    def noted(self: DraftLayers, layer: int, *args: Any) -> Any:
        num_passes.append(layer)
        return sound(self, layer, *args)

    monkeypatch.setattr(DraftLayers, "forward", noted)
    drafts = proposer.propose(x)
    assert drafts.cu_num_draft.tolist() == [0, 0, 0]
    assert len(num_passes) == 1


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_last_layer_only_stores_kv_where_nobody_may_draft(
    num_layers: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_model(tmp_path, NAME, "ernie-folder", num_layers)
    proposer = make_proposer(reference, num_layers, enforce_eager=True)
    x = step(reference, proposer, 2)
    begin(proposer, 0, 1)
    run_layers, sound = [], DraftLayers.forward

    def noted(self: DraftLayers, layer: int, *args: Any) -> Any:
        run_layers.append(layer)
        return sound(self, layer, *args)

    monkeypatch.setattr(DraftLayers, "forward", noted)
    assert len(proposer.propose(replace(x, max_draft_len=np.zeros(2, np.int32))).token_ids) == 0
    assert run_layers == list(range(num_layers - 1))


def test_drafts_end_with_the_rotary_table(reference: MtpReference, proposer: ModelProposer) -> None:
    x = step(reference, proposer, 2)
    begin(proposer, 0, 1)
    drafts = proposer.propose(replace(x, token_table=np.ascontiguousarray(x.token_table[:, :7])))
    assert np.diff(drafts.cu_num_draft).tolist() == [2, 2]


@pytest.mark.parametrize(("options", "message"), [({"model": "missing"}, "model: "), ({}, "num_model_steps: ")])
def test_draft_layers_that_cannot_serve_are_found_before_the_target_is_read(
    options: dict[str, str], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path, NAME, "ernie-folder", 2).path

    def fail(*_: object) -> None:
        raise AssertionError("the target was read")

    monkeypatch.setattr("fastdeploy_sd.worker.loading.model_loading.Decoder", fail)
    speculative = SpeculativeConfig(method="mtp", num_model_steps=3, **options)  # type: ignore[arg-type]
    config = Config(model=ModelConfig(model=str(path)), speculative=speculative)
    with pytest.raises(ConfigError, match=rf"speculative_config\.{message}expected"):
        create_executor(config)


def test_logprobs_are_the_draft_layers(reference: MtpReference, proposer: ModelProposer) -> None:
    x = step(reference, proposer, 3, [1, -1, 4])
    begin(proposer, 0, 1, 2)
    drafts = proposer.propose(x)
    found = drafts.logprobs
    assert found is not None
    assert found.top_token_ids.shape == (9, 4)
    assert found.ranks.tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert np.isnan(found.logprobs[3:6]).all()
    for r in (0, 2):
        text = x.token_table[x.table_rows[r], : x.num_tokens[r]]
        for i, want in enumerate(reference.logprobs(text, NUM_STEPS, reference.hidden(text[:-1]))):
            at = int(drafts.cu_num_draft[r]) + i
            np.testing.assert_allclose(found.logprobs[at], want[drafts.token_ids[at]], atol=1e-3)
            assert found.top_token_ids[at, 0] == drafts.token_ids[at]
            np.testing.assert_allclose(found.top_logprobs[at], want[found.top_token_ids[at]], atol=1e-3)


def test_engine_reports_draft_logprobs_only_where_asked(reference: MtpReference) -> None:
    engine, _ = make_engine(str(reference.path), 2, enable_draft_logprob=True)
    assert engine.model_info.speculation.has_draft_logprobs
    todo = make_requests([np.arange(4, 20, dtype=np.int32), np.arange(9, 30, dtype=np.int32)], 6)
    todo[0] = replace(todo[0], speculation=Speculation(num_draft_logprobs=2))
    for request in todo:
        engine.submit(request)
    found: dict[str, int] = {}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] = found.get(output.request_id, 0) + len(output.draft_logprobs or ())
    assert found["r0"] >= 5
    assert found["r1"] == 0


def test_a_method_that_needs_a_model_says_so_where_none_is_loaded() -> None:
    with pytest.raises(ConfigError, match="needs no model, as none is loaded, got 'mtp'"):
        create_method("mtp", SpeculativeConfig(method="mtp"), ProposerContext(1, 16, 100))


@pytest.mark.parametrize("quantization", [None, "none", "wint8", "wint4"])
def test_output_does_not_depend_on_how_draft_layers_are_stored(
    reference: MtpReference, quantization: str | None, tmp_path: pathlib.Path
) -> None:
    """The target is wint8; what its draft layers are changes drafts only."""
    prompts = [np.arange(4, 4 + n, dtype=np.int32) for n in (1, 20, 33)]
    common: dict[str, Any] = {"dtype": "bfloat16", "target_quantization": "wint8"}
    plain, _ = make_engine(str(reference.path), 0, method="naive", **common)
    want = run(plain, make_requests(prompts, 10))
    engine, recorder = make_engine(str(reference.path), 3, quantization=quantization, **common)
    assert run(engine, make_requests(prompts, 10)) == want
    assert sum(len(event.drafts) for event in recorder.events) > 20
