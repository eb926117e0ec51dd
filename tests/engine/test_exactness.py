"""The promise on real models: tokens and logprobs do not depend on how they were computed, bit for bit.

On the CPU, and all of it on a GPU where there is one; on the emulated one a small part is in test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import (
    PLAIN,
    EngineVariant,
    Matrix,
    all_variants,
    make_reference,
    quick_variants,
    run_cell,
    run_matrix,
    standard_methods,
)
from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from tests.engine.gpu import gpu_device
from tests.engine.models import DOUBLES, DOUBLES_WITH_DRAFT_KV, MODELS, References, fitted
from tests.models import golden
from tests.ops.backends import LEVELS, isa
from tests.ops.cuda_device import GPU

pytestmark = pytest.mark.slow

DraftHead = Literal["target", "wint8", "wint4"]
# Where a step's budget, not a request's chunk, cuts the prompts; the number of kernel threads.
OTHER_WAYS = [
    EngineVariant("budget of 16", max_num_seqs=12, max_num_batched_tokens=16, arrivals_per_step=3),
    EngineVariant(
        "budget of 24, preemption, prefix cache", max_num_seqs=8, num_blocks=14, max_num_batched_tokens=24,
        enable_prefix_caching=True, num_passes=2, must_preempt=True, must_hit=True,
    ),
    EngineVariant("blocks of 64", block_size=64, num_blocks=64),
    EngineVariant("three threads", num_threads=3),
]  # fmt: skip
# The tests compute on one thread; whole prompts in large batches have the largest ops to share out.
QUICK_WAYS = quick_variants()
QUICK_WAYS[2] = replace(QUICK_WAYS[2], num_threads=2)
FEW_WAYS = [quick_variants()[1], OTHER_WAYS[1]]
# So few blocks that requests are preempted even when all their drafts are accepted.
TIGHT_WAYS = [quick_variants()[3], replace(OTHER_WAYS[1], num_blocks=12)]
METHODS = ["ngram", "suffix", "mtp", "mtp-ngram", "mtp-suffix", "mixed", "auto"]
# Every method on every architecture; on further formats and layouts those that contain the others.
COLUMNS = [
    (m, method)
    for m in MODELS
    for method in METHODS
    if (m in golden.FIRST and method != "auto") or method in {"mtp-suffix", "mixed"}
]
# It drafts what two of the other methods do.
COLUMNS += [(m, "auto") for m in ("demo", "qwen3-tiny", "ernie4_5_moe-tiny")]
# Of another kind of attention, and of recurrent states.
COLUMNS += [(m, name) for m in ("deepseek_v3-tiny", "qwen3_5-tiny") for name in ("ngram", "mtp", "auto")]
MODEL_NAMES = list(MODELS)
DRAFT_LENGTHS = [1, 2, 3, 5]
LENGTH_METHODS = ["ngram", "suffix", "mtp", "mtp-suffix"]


def in_turn(ways: Sequence[EngineVariant], *indices: int) -> EngineVariant:
    """One of the ways, another for neighbours along any axis.

    A way knows neither model nor method, so every pair of a model, a method and a way runs, and not every triple: that
    is test_same_tokens_in_every_combination_of_ways.
    """
    return ways[sum(indices) % len(ways)]


@pytest.fixture(scope="module", params=["cpu", pytest.param(GPU, marks=pytest.mark.gpu)])
def references(
    request: pytest.FixtureRequest, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[References]:
    if request.param == "cpu":
        yield references
        return
    with gpu_device(GPU):
        yield References(tmp_path_factory.mktemp("models"), "gpu")


def check(matrix: Matrix) -> None:
    assert matrix.differences == []
    assert matrix.gaps == []


def test_the_requests_exercise_what_they_claim(references: References) -> None:
    answers = references.get("qwen3-tiny").answers
    assert {"stop", "length"} <= {answer.finish_reason for answer in answers.values()}
    assert len({answer.token_ids for answer in answers.values()}) > 25
    assert any(answer.logprobs for answer in answers.values())


@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_whatever_the_way(references: References, model: str) -> None:
    """The first ways meet every model with a method too; here each does with the one that few methods may leave out."""
    quick = in_turn(QUICK_WAYS, MODEL_NAMES.index(model), 3)
    check(run_matrix(references.get(model), [fitted(way, model) for way in (quick, *OTHER_WAYS)], [PLAIN]))


@pytest.mark.parametrize(("model", "method"), COLUMNS)
def test_same_tokens_whatever_the_method(references: References, model: str, method: str) -> None:
    # Each of two layers makes one step; a hybrid leaves them half of the drafts.
    k = 2 if model == "two MTP layers" and method == "mixed" else 4
    [column] = standard_methods([method], [k], model_method="mtp")
    assert model != "two MTP layers" or column.speculative.num_model_steps == 2
    indices = MODEL_NAMES.index(model), METHODS.index(method)
    ways = [fitted(in_turn(QUICK_WAYS, *indices, turn), model) for turn in (0, 2)]
    matrix = run_matrix(references.get(model), ways, [column])
    check(matrix)
    # What random weights say is hardly ever guessed; there the doubles stand in for right drafts.
    may_miss = set() if model == "demo" else {f"{column.name}: no draft was accepted in any way"}
    assert set(matrix.warnings) <= may_miss


@pytest.mark.parametrize("name", [name for name in golden.NAMES if name not in golden.FIRST])
def test_same_tokens_in_every_family(name: str) -> None:
    """Chunks, prefix cache and drafts, where rows of a step are at positions with other windows."""
    reference = make_reference(Config(ModelConfig(model=str(golden.ROOT / name))), seed=3, count=12)
    [column] = standard_methods(["ngram"], [4])
    way = EngineVariant(
        "budget of 24, prefix cache", max_num_seqs=4, num_blocks=64, max_num_batched_tokens=24,
        enable_prefix_caching=True, num_passes=2, must_hit=True,
    )  # fmt: skip
    cell = run_cell(reference.base, way, column, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)


@pytest.mark.parametrize("double", DOUBLES)
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_whatever_is_drafted(references: References, model: str, double: str) -> None:
    way = fitted(in_turn(TIGHT_WAYS, MODEL_NAMES.index(model), list(DOUBLES).index(double)), model)
    reference = references.get(model)
    cell = run_cell(reference.base, way, references.double(model, double, 4), reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0
    assert (cell.num_accepted > 0) == (double != "wrong")


@pytest.mark.parametrize("double", DOUBLES_WITH_DRAFT_KV)
@pytest.mark.parametrize("model", ["qwen3-tiny", "ernie4_5_moe-tiny", "two MTP layers", "demo"])
def test_same_tokens_whatever_is_drafted_beside_draft_kv(references: References, model: str, double: str) -> None:
    reference, k = references.get(model), 2 if model == "two MTP layers" else 4
    way = in_turn(TIGHT_WAYS, MODEL_NAMES.index(model), DOUBLES_WITH_DRAFT_KV.index(double))
    method = references.double(model, double, k)
    cell = run_cell(reference.base, way, method, reference.requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0
    assert (cell.num_accepted > 0) == ("wrong" not in double)


@pytest.mark.parametrize(
    ("i", "j"),
    [(i, j) for i, j in np.ndindex(len(DRAFT_LENGTHS), len(LENGTH_METHODS)) if DRAFT_LENGTHS[i] > 1 or j < 3],
)
def test_same_tokens_whatever_the_draft_length(references: References, i: int, j: int) -> None:
    """Every length with every method, a hybrid from two drafts on. Models and ways take turns and meet all of both."""
    model = ["ernie4_5-tiny", "qwen3_moe-tiny", "demo"][(i + j) % 3]
    methods = standard_methods([LENGTH_METHODS[j]], [DRAFT_LENGTHS[i]])
    matrix = run_matrix(references.get(model), [in_turn(FEW_WAYS, i, j)], methods)
    check(matrix)
    assert model != "demo" or matrix.warnings == []


@pytest.mark.parametrize("head", ["target", "wint8", "wint4"])
@pytest.mark.parametrize("model", ["demo", "wint4"])
def test_same_tokens_whatever_head_drafts(references: References, model: str, head: DraftHead) -> None:
    """The other tests draft with the default's copy in 4 bits."""
    methods = standard_methods(["mtp", "mtp-ngram"], [3], SpeculativeConfig(draft_head_quantization=head))
    first = ["target", "wint8", "wint4"].index(head)
    for i, method in enumerate(methods):
        matrix = run_matrix(references.get(model), [in_turn(FEW_WAYS, first, i)], [method])
        check(matrix)
        assert model != "demo" or matrix.warnings == []


@pytest.mark.parametrize("model", ["demo", "two MTP layers"])
def test_same_tokens_wherever_improbable_drafts_end_a_chain(references: References, model: str) -> None:
    # What random layers are sure of is little more than one token in 4096.
    k, draft_p_min = (2, 8e-4) if model == "two MTP layers" else (4, 0.4)
    methods = standard_methods(["mtp", "mtp-ngram"], [k])
    methods = [replace(m, speculative=replace(m.speculative, draft_p_min=draft_p_min)) for m in methods]
    for way, method in zip(FEW_WAYS, methods, strict=True):
        check(run_matrix(references.get(model), [way], [method]))


@pytest.mark.long
def test_same_tokens_in_every_combination_of_ways(references: References) -> None:
    """Every combination runs with one method; any two values of its four axes, and the other ways, with both."""
    ways = [way for way in all_variants() if references.device == "cpu" or not way.enforce_eager]
    methods = standard_methods(["mtp-suffix", "mixed"], [4])
    product = [way for way in ways if way.name.startswith("batch ")]
    for first, method in enumerate(methods):
        own = [way for i, way in enumerate(product) if (i + i // 4 + first) % 2]
        own += [way for way in ways if way not in product]
        check(run_matrix(references.get("ernie4_5-tiny"), own, [method]))


def test_a_way_that_must_preempt_does_so_however_much_is_drafted(references: References) -> None:
    """Requests that are drafted for well end early, and need not be in each other's way by themselves."""
    reference = references.get("demo")
    tight = [way for way in all_variants() if way.must_preempt]
    cells = [(way, references.double("demo", "oracle", 8)) for way in tight]
    cells += [(quick_variants()[1], method) for method in standard_methods(["mtp"], [3, 5])]
    for way, method in cells:
        first = replace(way, num_requests=6, num_passes=1, must_hit=False)
        cell = run_cell(reference.base, first, method, reference.requests, reference.answers)
        assert (cell.difference, cell.missing) == (None, None), (way.name, method.name)


@pytest.mark.parametrize("strategy", ["greedy", "topp"])
def test_every_strategy_is_lossless_at_temperature_0(
    references: References, strategy: Literal["greedy", "topp"]
) -> None:
    reference = references.get("demo")
    greedy = [r for r in reference.requests if r.sampling.temperature == 0]
    [column] = standard_methods(["mtp-ngram"], [4])
    column = replace(column, speculative=replace(column.speculative, verify_strategy=strategy))
    answers = {r.request_id: reference.answers[r.request_id] for r in greedy}
    cell = run_cell(reference.base, replace(FEW_WAYS[0], must_preempt=False), column, greedy, answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert 0 < cell.num_accepted < cell.num_drafts


@pytest.mark.fast
@pytest.mark.parametrize("level", LEVELS)
def test_the_promise_holds_at_every_isa_level(references: References, level: str) -> None:
    if references.device == "gpu":
        pytest.skip("levels are a processor's")
    with isa(level):
        reference = make_reference(references.base("qwen3-tiny"), seed=5, count=12)
        methods = standard_methods(["mtp-suffix", "mixed"], [3], model_method="mtp")
        check(run_matrix(reference, FEW_WAYS[:1], [PLAIN, *methods]))


def test_a_draft_model_that_is_always_right_saves_steps(references: References) -> None:
    reference = references.get("qwen3-tiny")
    way = replace(quick_variants()[0], enable_prefix_caching=False, must_hit=False, num_passes=1)
    cell = run_cell(
        reference.base, way, references.double("qwen3-tiny", "oracle", 4), reference.requests, reference.answers
    )
    assert cell.num_emitted > 4 * cell.num_verifications
