"""Heads over the target's newest row draft what their formulas say, and outputs are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, Reference, quick_variants, run_cell
from fastdeploy_sd.config import ParallelConfig, SpeculativeConfig
from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.types import Speculation
from tests.engine.models import References
from tests.models import golden, head_models
from tests.models.head_models import HeadReference
from tests.models.mtp_runs import Event, make_engine, make_requests, run
from tests.models.numpy_decoder import NumpyDecoder

pytestmark = pytest.mark.slow

NAME, K = "llama-tiny", 3
TARGET = str(golden.ROOT / NAME)
PROMPTS = [np.random.default_rng(n).integers(4, 4096, n).astype(np.int32) for n in (2, 16, 17, 40)]
Make = Callable[[Path, str], HeadReference]
HEADS: dict[str, Make] = {
    "medusa": head_models.make_medusa,
    "medusa in vLLM's layout": partial(head_models.make_medusa, numbered=False),
    "hydra": head_models.make_hydra,
    "hydra with a prefix layer": partial(head_models.make_hydra, has_prefix_layer=True),
    "mlp_speculator": head_models.make_mlp_speculator,
    "mlp_speculator, tied": partial(head_models.make_mlp_speculator, tied=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "eager": {"enforce_eager": True},
    "chunks": {"long_prefill_token_threshold": 7, "max_num_batched_tokens": 40},
    "preemption": {"num_blocks": 7, "enable_prefix_caching": True},
}


def options(kind: str, reference: HeadReference) -> dict[str, Any]:
    return {"method": kind.split(maxsplit=1)[0].rstrip(","), "model": str(reference.path)}


def check_drafts(events: Sequence[Event], reference: HeadReference, texts: Sequence[Sequence[int]]) -> None:
    """Every draft is the formula's, given the target's rows of these texts, which the drafted ones begin."""
    target = NumpyDecoder(NAME, "float32", "float32")
    rows = [(text, reference.rows(target, np.array(text, np.int32))) for text in texts]
    for event in (event for event in events if len(event.drafts)):
        length = len(event.text)
        found = next(hidden for text, hidden in rows if list(text[:length]) == event.text.tolist())
        wanted, lead = reference.drafts(found[length - 2], int(event.text[-1]), len(event.drafts))
        assert lead > 2e-5, "a draft that rounding decides shows nothing"
        assert event.drafts.tolist() == wanted


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "together") for kind in HEADS),
        *(("hydra with a prefix layer", way) for way in WAYS if way != "together"),
        ("medusa", "eager"),
        ("mlp_speculator", "preemption"),
        ("medusa", "chunks"),
    ],
)
def test_drafts_are_what_the_formulas_say(tmp_path: Path, kind: str, way: str) -> None:
    reference = HEADS[kind](tmp_path / "heads", NAME)
    engine, recorder = make_engine(TARGET, K, **options(kind, reference), **WAYS[way])
    requests = make_requests(PROMPTS, 6, ignore_eos=True)
    outputs = run(engine, requests)
    assert (engine.stats().num_preemptions > 0) == (way == "preemption")
    check_drafts(recorder.events, reference, list(outputs.values()))
    first = {(event.request_id, len(event.text)) for event in recorder.events if len(event.drafts) == K}
    if way in ("together", "eager"):  # else some step has no room for the drafts of a prompt that ends
        assert {(r.request_id, len(r.prompt_token_ids) + 1) for r in requests} <= first


@pytest.mark.parametrize("kind", ["medusa", "hydra with a prefix layer"])
def test_a_prompt_that_is_in_the_prefix_cache_is_drafted_for_at_once(tmp_path: Path, kind: str) -> None:
    """As much of it is found as without drafts."""
    reference = HEADS[kind](tmp_path / "heads", NAME)
    num_hit = []
    for drafting in (options(kind, reference), {"method": "naive"}):
        engine, recorder = make_engine(TARGET, K, **drafting, enable_prefix_caching=True)
        [request] = make_requests([PROMPTS[3]], 6, ignore_eos=True)
        outputs = run(engine, [request])
        num_events = len(recorder.events)
        assert run(engine, [replace(request, request_id="again")])["again"] == outputs["r0"]
        num_hit.append(engine.stats().num_prefix_hit_tokens)
        assert engine.stats().num_prefix_lost_tokens == 0
        if drafting["method"] != "naive":
            assert len(recorder.events[num_events].text) == len(PROMPTS[3]) + 1
            assert len(recorder.events[num_events].drafts) == K
            check_drafts(recorder.events, reference, list(outputs.values()))
    assert num_hit[0] == num_hit[1] == 32


def fitted_medusa(folder: Path, reference: Reference) -> str:
    """Heads without blocks that know some of these answers: least squares from the target's rows to the tokens."""
    target = NumpyDecoder(reference.base.model.path, "float32", "float32")
    rows, following = [], [list[int]() for _ in range(K)]
    for request in reference.requests:
        text = [*request.prompt_token_ids.tolist(), *reference.answers[request.request_id].token_ids]
        begin, end = len(request.prompt_token_ids) - 1, len(text) - 1 - K
        if end <= begin:
            continue
        rows.append(target.hidden(np.array(text, np.int32))[begin:end])
        for i in range(K):
            following[i] += text[begin + 2 + i : end + 2 + i]
    inverse, size = np.linalg.pinv(np.concatenate(rows)), rows[0].shape[1]
    tensors: dict[str, np.ndarray] = {}
    for i, tokens in enumerate(following):
        tensors[f"{i}.0.linear.weight"], head = np.zeros((size, size), np.float32), np.zeros((4096, size), np.float32)
        np.add.at(head, tokens, inverse.T)
        tensors[f"{i}.1.weight"] = head
    head_models.write(folder, "medusa_lm_head", {"medusa_num_heads": K}, tensors)
    return str(folder)


@pytest.mark.parametrize("way", [quick_variants()[1], quick_variants()[4]], ids=lambda way: way.name)
@pytest.mark.parametrize("kind", ["fitted medusa", "hydra with a prefix layer", "mlp_speculator"])
def test_same_tokens_as_plain_decoding(tmp_path: Path, references: References, kind: str, way: EngineVariant) -> None:
    reference = references.get("float32")
    method, model = config_of(kind, tmp_path / "heads", reference)
    config = SpeculativeConfig(method, K, model=model, num_model_steps=K)
    cell = run_cell(reference.base, way, Method(method, config), reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0
    assert kind != "fitted medusa" or cell.num_accepted > cell.num_drafts / 10


@pytest.mark.parametrize(
    ("kind", "draft_size"),
    [("hydra with a prefix layer", 2), ("mlp_speculator", 2), ("fitted medusa", 1)],
)
def test_same_tokens_on_several_ranks(tmp_path: Path, references: References, kind: str, draft_size: int) -> None:
    reference, way = references.get("float32"), replace(quick_variants()[4], num_requests=8)
    method, model = config_of(kind, tmp_path / "heads", reference)
    base = replace(reference.base, parallel=ParallelConfig(tensor_parallel_size=2, rank_timeout_s=60.0))
    config = SpeculativeConfig(method, K, model=model, num_model_steps=K, draft_tensor_parallel_size=draft_size)
    requests = reference.requests[: way.num_requests]
    answers = {r.request_id: reference.answers[r.request_id] for r in requests}
    cell = run_cell(base, way, Method(method, config), requests, answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0


def test_as_a_source_of_auto_they_change_no_token(tmp_path: Path, references: References) -> None:
    reference, way = references.get("float32"), quick_variants()[3]
    model = fitted_medusa(tmp_path / "heads", reference)
    config = SpeculativeConfig(
        "auto", 6, auto_with_draft_model=True, draft_method="medusa", model=model, num_model_steps=K
    )
    asked = Speculation(), Speculation(method="medusa"), Speculation(enabled=False)
    column = Method("auto", config, speculations=asked)
    cell = run_cell(reference.base, way, column, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


def config_of(kind: str, folder: Path, reference: Reference) -> tuple[str, str]:
    """Return the method and the folder of these heads for a target."""
    if kind == "fitted medusa":
        return "medusa", fitted_medusa(folder, reference)
    return kind.split(maxsplit=1)[0], str(HEADS[kind](folder, "qwen3-tiny").path)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "mlp_speculator"])
def test_more_drafts_than_heads_are_refused(tmp_path: Path, kind: str) -> None:
    reference = HEADS[kind](tmp_path / "heads", NAME)
    message = (
        f"num_speculative_tokens, num_model_steps: expected at most 3, as {reference.path} has so many heads .*, got 4"
    )
    with pytest.raises(ConfigError, match=message):
        make_engine(TARGET, 4, **options(kind, reference))


@pytest.mark.parametrize(
    ("kind", "config", "tensor", "message"),
    [
        ("medusa", {}, "2.0.linear.weight", r"expected heads numbered from 0 without a gap, got 0, 1, 3"),
        ("medusa", {}, "2.2.weight", r"tensor '2.2.weight': expected shape \(4096, 128\), got \(3, 128\)"),
        (
            "hydra",
            {"hydra_head_arch": "eagle-attn"},
            "",
            "hydra_head_arch: expected mlp or prefix-mlp, got 'eagle-at",
        ),
        ("hydra", {"hidden_state_offset": 2}, "", "hidden_state_offset: expected 0, the target's last row, got 2"),
        ("mlp_speculator", {"n_predict": 0}, "", "n_predict: expected an integer from 1 to 64, got 0"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, kind: str, config: dict[str, Any], tensor: str, message: str
) -> None:
    reference = HEADS[kind](tmp_path / "heads", NAME)
    head_models.change(reference.path, config, tensor)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        make_engine(TARGET, K, **options(kind, reference))
