"""The promise on real models: tokens and logprobs do not depend on how they were computed, bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from fastdeploy_sd.ops import library
from fastdeploy_sd.types import Request
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer
from tests.engine.exactness import Answer, Setup, continuations, make_engine, requests, run, run_alone
from tests.models import golden
from tests.ops.backends import isa

MODELS = {
    **{name: {"dtype": "bfloat16"} for name in golden.NAMES},
    "float32": {"dtype": "float32"},
    "wint8": {"dtype": "bfloat16", "quantization": "wint8"},
    "wint4": {"dtype": "bfloat16", "quantization": "wint4"},
}
CHECKPOINTS = {"float32": "qwen3-tiny", "wint8": "ernie4_5_moe-tiny", "wint4": "qwen3_moe-tiny"}
WAYS = {
    "all at once": (Setup(), 1000),
    "batch of 7, arriving one by one": (Setup(max_num_seqs=7), 1),
    "chunks of 16": (Setup(max_num_seqs=12, max_num_batched_tokens=16), 3),
    "chunks of 64": (Setup(max_num_batched_tokens=64), 1000),
    "prefix cache": (Setup(enable_prefix_caching=True), 2),
    "preemption": (Setup(max_num_seqs=8, num_blocks=14), 1000),
    "preemption, chunks, prefix cache": (
        Setup(max_num_seqs=8, num_blocks=14, max_num_batched_tokens=24, enable_prefix_caching=True), 2,
    ),
    "blocks of 64": (Setup(block_size=64, num_blocks=64), 1000),
    "one thread": (Setup(num_threads=1), 1000),
    "three threads": (Setup(num_threads=3), 1000),
}  # fmt: skip
DOUBLES = {"oracle": OracleProposer, "wrong": WrongProposer, "random": RandomLengthProposer}


def base(model: str) -> Setup:
    return Setup(model=MODELS[model])


@functools.cache
def todo() -> tuple[Request, ...]:
    return tuple(requests(seed=3, count=36))


@functools.cache
def alone(model: str) -> dict[str, Answer]:
    return run_alone(CHECKPOINTS.get(model, model), base(model), todo())


@functools.cache
def known(model: str) -> dict[str, list[int]]:
    return continuations(CHECKPOINTS.get(model, model), base(model), todo())


@pytest.fixture(autouse=True)
def _threads():  # type: ignore[no-untyped-def]
    before = library.num_threads()
    yield
    library.set_num_threads(before)


def test_the_requests_exercise_what_they_claim() -> None:
    answers = alone("qwen3-tiny")
    reasons = {answer.finish_reason for answer in answers.values()}
    assert {"stop", "length"} <= reasons
    assert len({answer.token_ids for answer in answers.values()}) > 25
    assert any(answer.logprobs for answer in answers.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_whatever_the_way(model: str, way: str) -> None:
    setup, arrivals = WAYS[way]
    engine = make_engine(CHECKPOINTS.get(model, model), replace(setup, model=MODELS[model]))
    got = run(engine, todo(), arrivals)
    assert got == alone(model)
    stats = engine.stats()
    if "preemption" in way:
        assert stats.num_preemptions > 0
    if "prefix cache" in way:
        again = run(engine, [replace(r, request_id=f"{r.request_id}-again") for r in todo()], arrivals)
        assert [again[f"{r.request_id}-again"] for r in todo()] == [got[r.request_id] for r in todo()]
        assert engine.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("double", DOUBLES)
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_whatever_is_drafted(model: str, double: str, num_drafts: int) -> None:
    checkpoint = CHECKPOINTS.get(model, model)
    for setup, arrivals in (WAYS["all at once"], WAYS["preemption, chunks, prefix cache"]):
        drafting = replace(setup, model=MODELS[model], num_drafts=num_drafts, max_num_seqs=8, max_num_batched_tokens=48)
        engine = make_engine(checkpoint, drafting, DOUBLES[double](known(model), 4096))
        assert run(engine, todo(), arrivals) == alone(model)
        stats = engine.stats()
        assert stats.num_draft_tokens > 0
        if double == "wrong":
            assert stats.num_accepted_tokens == 0
        else:
            assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("level", library.available_isas())
def test_the_promise_holds_at_every_isa_level(level: str) -> None:
    few = todo()[:12]
    with isa(level):
        expected = run_alone("qwen3-tiny", base("qwen3-tiny"), few)
        setup = Setup(max_num_seqs=5, max_num_batched_tokens=24, num_drafts=3)
        double = RandomLengthProposer(continuations("qwen3-tiny", base("qwen3-tiny"), few), 4096)
        assert run(make_engine("qwen3-tiny", setup, double), few, 2) == expected
