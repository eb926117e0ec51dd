"""A whole model drafts for another one: right drafts wherever its KV comes from, and the bytes of plain decoding."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import EngineVariant, Method, quick_variants, run_cell
from fastdeploy_sd.config import ParallelConfig, SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.llm import LLM
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.model_based.draft_memory import StepPlan
from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import I32, Speculation
from fastdeploy_sd.worker.loading import model_loading
from fastdeploy_sd.worker.loading.draft_vocabulary import translated
from tests.engine.models import References
from tests.models import gguf_files, golden, rewrite
from tests.models.mtp_runs import Event, make_engine, make_requests, run

pytestmark = pytest.mark.slow

TARGET, DRAFT = (str(golden.ROOT / name) for name in ("llama-tiny", "qwen3-tiny"))
K = 4
_EIGHT = 0x4100  # as bfloat16
OPTIONS: dict[str, Any] = {"method": "draft_model", "model": DRAFT}
PROMPTS = [np.random.default_rng(n).integers(4, 4096, n).astype(np.int32) for n in (3, 16, 17, 40, 75)]
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "eager": {"enforce_eager": True},
    "chunks": {"long_prefill_token_threshold": 7, "max_num_batched_tokens": 40},
    "preemption": {"num_blocks": 14, "enable_prefix_caching": True},
}


def continued(model: str, texts: Sequence[I32]) -> list[list[int]]:
    """What the model says by itself after these texts, greedily."""
    engine, _ = make_engine(model, 0, method="naive", num_blocks=512)
    outputs = run(engine, make_requests(texts, K, ignore_eos=True))
    return [outputs[f"r{i}"][len(text) :] for i, text in enumerate(texts)]


def check_drafts(events: Sequence[Event]) -> None:
    """Each draft is what the model says after the text and the drafts before it."""
    found = {(event.text.tobytes(), event.drafts.tobytes()): event for event in events if len(event.drafts)}
    wanted = continued(DRAFT, [event.text for event in found.values()])
    for event, tokens in zip(found.values(), wanted, strict=True):
        assert event.drafts.tolist() == tokens[: len(event.drafts)]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_what_the_model_says_by_itself(way: str) -> None:
    engine, recorder = make_engine(TARGET, K, **OPTIONS, **WAYS[way])
    requests = make_requests(PROMPTS, 12, ignore_eos=True)
    run(engine, requests)
    assert (engine.stats().num_preemptions > 0) == (way == "preemption")
    check_drafts(recorder.events)
    drafted = {(event.request_id, len(event.text)) for event in recorder.events if len(event.drafts)}
    assert {r.request_id for r in requests} == {request_id for request_id, _ in drafted}
    if way != "chunks":  # there a step has no room for the longer prompts
        assert {(r.request_id, len(r.prompt_token_ids) + 1) for r in requests} <= drafted


def test_a_prompt_that_no_draft_was_made_for_is_caught_up_with() -> None:
    """Its blocks come from a request that forbids drafts, and from one that is drafted for."""
    engine, recorder = make_engine(TARGET, K, **OPTIONS, enable_prefix_caching=True, max_num_batched_tokens=32)
    prompt = np.random.default_rng(5).integers(4, 4096, 70).astype(np.int32)
    first, second, third = (
        replace(request, request_id=name)
        for name in ("plain", "late", "later")
        for request in make_requests([prompt], 12, ignore_eos=True)
    )
    run(engine, [replace(first, speculation=Speculation(enabled=False))])
    run(engine, [second])
    num_late = [len(event.drafts) for event in recorder.events if event.request_id == "late"]
    run(engine, [third])
    num_later = [len(event.drafts) for event in recorder.events if event.request_id == "later"]
    # 71 tokens take three steps of 32, the first without a draft; then 64 of them are there.
    assert num_late[:3] == [0, 0, K]
    assert num_later[0] == K
    stats = engine.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_prefix_lost_tokens) == (2 * 64, 0), "all share blocks"
    check_drafts(recorder.events)


def test_drafts_that_were_accepted_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that drafts for itself is always right. Then a pass begins with the last draft and the token after it."""
    num_run: list[int] = []
    make_plan = StepPlan.make

    def noted(self: StepPlan, x: ProposeInput, step: TargetStep) -> bool:
        fills = make_plan(self, x, step)
        num_run.append(self._memory.num_tokens[0])
        return fills

    monkeypatch.setattr(StepPlan, "make", noted)
    engine, _ = make_engine(DRAFT, K, **OPTIONS)
    run(engine, make_requests([PROMPTS[3]], 1 + 4 * (K + 1), ignore_eos=True))
    drafts = engine.stats().drafts["draft_model"]
    assert drafts.accepted == drafts.drafted == (4, 4, 4, 4)
    assert num_run == [len(PROMPTS[3]) + 1, 2, 2, 2, 0]


@pytest.mark.parametrize("way", [quick_variants()[1], quick_variants()[4]], ids=lambda way: way.name)
@pytest.mark.parametrize("model", ["float32", "wint8", "int8 KV"])
def test_same_tokens_as_plain_decoding(references: References, model: str, way: EngineVariant) -> None:
    reference = references.get(model)
    config = SpeculativeConfig(method="draft_model", model=DRAFT, num_speculative_tokens=K, num_model_steps=K)
    cell = run_cell(reference.base, way, Method("draft_model", config), reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (None, "speculative_config.model: expected the folder of a whole model for method draft_model, got nothing"),
        ("/no/model", "speculative_config.model: expected the folder of .* got '/no/model'"),
    ],
)
def test_a_model_must_be_there(draft: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(TARGET, K, **(OPTIONS | {"model": draft}))


def changed_vocabulary(folder: Path) -> Path:
    """A draft model in whose vocabulary two tokens are exchanged."""
    shutil.copytree(DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (next(text for text, i in vocabulary.items() if i == wanted) for wanted in (300, 301))
    vocabulary[first], vocabulary[second] = 301, 300
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    folder = changed_vocabulary(tmp_path / "draft")
    first, second = (load_tokenizer(Path(DRAFT)).token_bytes(i) for i in (300, 301))
    message = f"vocabulary, in which token 300 is {first!r}, got {second!r} in {folder}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_engine(TARGET, K, **(OPTIONS | {"model": str(folder)}))


def reordered(folder: Path) -> str:
    """The draft model with other ids for most tokens."""
    rewrite.write_folder(folder, "qwen3-tiny", {})
    order = np.concatenate([np.arange(300), np.arange(300, 4096)[::-1]])
    tensors = rewrite.read("qwen3-tiny")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        if key in tensors:
            tensors[key] = tensors[key][order]
    rewrite.write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    tokenizer = json.loads((Path(DRAFT) / "tokenizer.json").read_text())
    new_ids = np.argsort(order).tolist()
    tokenizer["model"]["vocab"] = {text: new_ids[i] for text, i in tokenizer["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.mark.parametrize("eager", [False, True])
def test_tokens_are_translated(tmp_path: Path, eager: bool) -> None:
    """The drafts are those of the same model with the target's ids."""
    other = {**OPTIONS, "model": reordered(tmp_path / "draft"), "translate_tokens": True}
    found = []
    for options in (OPTIONS, other):
        engine, recorder = make_engine(TARGET, K, enforce_eager=eager, **options)
        outputs = run(engine, make_requests(PROMPTS, 12, ignore_eos=True))
        found.append((outputs, [event.drafts.tolist() for event in recorder.events]))
    assert found[0] == found[1]
    assert sum(map(len, found[0][1])) > 0


def test_a_token_that_the_draft_model_has_not_is_read_as_the_longest_that_it_ends_with() -> None:
    translation = translated([b"a", b"bca", b"xyz", b"z"], [b"z", b"ca", b"a"])
    assert translation.own.tolist() == [2, 1, 0, 0]
    assert translation.drafted.tolist() == [0, 3]


def padded(folder: Path, name: str, vocab_size: int, bits: int) -> str:
    """A golden model with further rows in its embedding and head, each of them one bfloat16 number."""
    rewrite.write_folder(folder, name, {"vocab_size": vocab_size})
    tensors = rewrite.read(name)
    for key in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        more = np.full((vocab_size - len(tensors[key]), tensors[key].shape[1]), bits, np.uint16)
        tensors[key] = np.concatenate([tensors[key], more])
    rewrite.write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    return str(folder)


def test_rows_that_pad_a_vocabulary_are_never_drafted(tmp_path: Path) -> None:
    larger = padded(tmp_path / "larger", "qwen3-tiny", 4160, _EIGHT)
    engine, recorder = make_engine(TARGET, K, **(OPTIONS | {"model": larger}))
    run(engine, make_requests(PROMPTS, 8, ignore_eos=True))
    check_drafts(recorder.events)


def test_a_request_with_a_token_that_the_draft_model_has_not_goes_on_without_drafts(tmp_path: Path) -> None:
    larger = padded(tmp_path / "larger", "llama-tiny", 4160, 0)
    engine, recorder = make_engine(larger, K, **OPTIONS)
    prompts = [PROMPTS[2], np.array([9, 4159, 30], np.int32), PROMPTS[1]]
    run(engine, make_requests(prompts, 6, ignore_eos=True))
    num_drafts = {event.request_id: 0 for event in recorder.events}
    for event in recorder.events:
        num_drafts[event.request_id] += len(event.drafts)
    assert num_drafts["r1"] == 0


@pytest.mark.parametrize(("size", "draft_size"), [(2, 2), (4, 4), (2, 1)])
def test_same_tokens_on_several_ranks(references: References, size: int, draft_size: int) -> None:
    reference, way = references.get("float32"), replace(quick_variants()[4], num_requests=12)
    base = replace(reference.base, parallel=ParallelConfig(tensor_parallel_size=size, rank_timeout_s=60.0))
    config = SpeculativeConfig("draft_model", K, model=DRAFT, num_model_steps=K, draft_tensor_parallel_size=draft_size)
    answers = {r.request_id: reference.answers[r.request_id] for r in reference.requests[: way.num_requests]}
    cell = run_cell(base, way, Method("draft_model", config), reference.requests[: way.num_requests], answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


@pytest.mark.parametrize("way", [quick_variants()[4], quick_variants()[3]], ids=lambda way: way.name)
def test_as_a_source_of_auto_it_changes_no_token(references: References, way: EngineVariant) -> None:
    """Of five requests one forces it, one forces it for one draft, and two do without it."""
    reference = references.get("float32")
    config = SpeculativeConfig("auto", 6, auto_with_draft_model=True, model=DRAFT, num_model_steps=K)
    asked = (
        Speculation(),
        Speculation(method="draft_model"),
        Speculation(method="ngram"),
        Speculation(method="draft_model", num_speculative_tokens=1),
        Speculation(enabled=False),
    )
    column = Method("auto", config, speculations=asked)
    cell = run_cell(reference.base, way, column, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


def test_a_request_beyond_the_draft_models_context_goes_on_without_drafts(tmp_path: Path) -> None:
    folder = rewrite.write_folder(tmp_path / "short", "qwen3-tiny", {"max_position_embeddings": 48})
    rewrite.write_file(folder / "model.safetensors", rewrite.read("qwen3-tiny"), {"format": "pt"})
    engine, recorder = make_engine(TARGET, K, **(OPTIONS | {"model": str(folder)}))
    run(engine, make_requests([PROMPTS[3], PROMPTS[4]], 24, ignore_eos=True))
    lengths = {len(event.text) + len(event.drafts) for event in recorder.events if len(event.drafts)}
    assert max(lengths) == 48 + 1  # the last draft comes from the row at position 47
    check_drafts(recorder.events)


def test_a_block_that_others_wrote_to_since_is_not_taken_for_filled() -> None:
    """Without a prefix cache a prompt may get the block that it had before, with part of another text in it."""
    engine, recorder = make_engine(TARGET, K, **OPTIONS, num_blocks=2, max_num_seqs=1)
    long, short = PROMPTS[2], PROMPTS[0]
    for i in range(4):
        for name, prompt in ("long", long), ("short", short):
            [request] = make_requests([prompt], 5, ignore_eos=True)
            run(engine, [replace(request, request_id=f"{name} {i}")])
    check_drafts(recorder.events)
    assert sum(len(event.drafts) > 0 for event in recorder.events if event.request_id.startswith("long")) > 4


@pytest.mark.parametrize(("quantization", "keeps_integers"), [(None, True), ("wint8", False)])
def test_a_gguf_file_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None, keeps_integers: bool
) -> None:
    """Its integers stay as they are unless another format is asked for."""
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))
    kept: list[bool] = []

    class Noted(WeightPacker):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kept.append(self.keeps_integers)

    monkeypatch.setattr(model_loading, "WeightPacker", Noted)
    path = gguf_files.write(tmp_path / "draft.gguf", "qwen3-tiny", "Q8_0")
    drafting = {"method": "draft_model", "model": str(path), "quantization": quantization}
    params, prompts = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), [PROMPTS[1].tolist()]
    plain, drafted = (
        LLM(TARGET, speculative_config=speculative, max_model_len=64).generate(
            prompt_token_ids=prompts, sampling_params=params
        )[0]
        for speculative in ("naive", drafting)
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    metrics = drafted.outputs[0].metrics
    assert metrics is not None
    assert metrics.drafts.drafted[0] > 0
    assert kept == [True, True, keeps_integers]
