"""The parts of the matrix: requests, ways, methods, comparison and tables, and running on the toy engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fastdeploy_sd.cli.verify import (
    METHOD_NAMES,
    PLAIN,
    SAMPLINGS,
    Answer,
    Cell,
    Difference,
    EngineVariant,
    Matrix,
    Method,
    all_variants,
    compare,
    make_requests,
    quick_variants,
    run,
    standard_methods,
)
from fastdeploy_sd.cli.verify.report import findings, matrix_json, matrix_table
from fastdeploy_sd.cli.verify.requests import GRAMMARS, NUM_LONG, USUAL_LENGTHS, with_grammars
from fastdeploy_sd.cli.verify.runs import engine_config
from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import FinishReason, Speculation, TokenLogprob
from fastdeploy_sd.types.draft_methods import FOLDER_METHODS
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel

SAID = Answer((5, 6), (TokenLogprob(5, -1.0, 1), TokenLogprob(6, -2.0, 1)), FinishReason.STOP, 6)


def test_requests_cover_every_sampling_with_both_kinds_of_prompt() -> None:
    requests = make_requests(0, 2 * len(SAMPLINGS), 4096)
    assert {r.sampling.temperature == 0.0 for r in requests} == {True, False}
    for i in range(len(SAMPLINGS)):
        one, other = requests[i], requests[i + len(SAMPLINGS)]
        assert replace(one.sampling) == other.sampling
    assert len({r.prompt_token_ids.tobytes()[: 16 * 4] for r in requests}) < len(requests)
    assert max(len(r.prompt_token_ids) + r.max_tokens for r in requests) <= USUAL_LENGTHS.whole
    again = make_requests(0, 2 * len(SAMPLINGS), 4096)
    assert [r.prompt_token_ids.tolist() for r in again] == [r.prompt_token_ids.tolist() for r in requests]
    assert make_requests(1, 1, 4096)[0].prompt_token_ids.tolist() != requests[0].prompt_token_ids.tolist()


def test_the_first_requests_are_long_whatever_the_seed() -> None:
    """What ways that must preempt count on."""
    for seed in range(20):
        long = make_requests(seed, 12, 4096)[:NUM_LONG]
        assert [len(r.prompt_token_ids) for r in long] == [USUAL_LENGTHS.long_prompt] * NUM_LONG
        assert [len(r.prompt_token_ids) + r.max_tokens for r in long] == [USUAL_LENGTHS.long] * NUM_LONG
        assert not any(r.eos_token_ids or r.sampling.stop_token_ids for r in long)
        assert long[0].prompt_token_ids[0] != long[1].prompt_token_ids[0], "they share no block"


def test_half_of_the_prompts_repeat_themselves() -> None:
    requests = make_requests(0, 48, 4096)
    tails = [r.prompt_token_ids[-17:].tolist() for r in requests if len(r.prompt_token_ids) >= 17]
    repetitive = [tail for tail in tails if any(tail[:-period] == tail[period:] for period in range(3, 9))]
    assert len(tails) / 4 < len(repetitive) < len(tails)


def test_every_sampling_gets_both_kinds() -> None:
    kinds: dict[int, set[bool]] = {}
    for i, request in enumerate(make_requests(0, 20 * len(SAMPLINGS), 4096)):
        tail = request.prompt_token_ids[-17:].tolist()
        if len(tail) == 17:
            is_repetitive = any(tail[:-period] == tail[period:] for period in range(3, 9))
            kinds.setdefault(i % len(SAMPLINGS), set()).add(is_repetitive)
    assert kinds == {i: {True, False} for i in range(len(SAMPLINGS))}


def test_requests_name_the_models_own_end_of_text() -> None:
    [ends_early] = [r for r in make_requests(0, 12, 4096, (77, 78)) if r.sampling.logit_bias.get(77) == 7.0]
    assert ends_early.eos_token_ids == (77, 78)
    assert all(r.eos_token_ids == () for r in make_requests(0, 12, 4096, ()))
    with pytest.raises(ValueError, match="vocab_size: expected at least 128, got 64"):
        make_requests(0, 1, 64)


def test_grammars_meet_every_sampling_that_lets_them_end() -> None:
    requests = make_requests(0, 64, 4096)
    guided = with_grammars(requests, max(USUAL_LENGTHS.output))
    found = [i for i, request in enumerate(guided) if request.grammar]
    assert Counter(guided[i].grammar for i in found) == dict.fromkeys(GRAMMARS, 4)
    assert len({i % len(SAMPLINGS) for i in found}) == len(SAMPLINGS) - 1
    assert not any(guided[i].sampling.min_tokens for i in found)
    assert max(len(r.prompt_token_ids) + r.max_tokens for r in guided) <= USUAL_LENGTHS.whole
    free = [i for i in range(64) if i not in found]
    assert [guided[i] for i in free] == [requests[i] for i in free]


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (SAID, None),
        (replace(SAID, token_ids=(5, 7)), "r, token at 1: expected 6, got 7"),
        (replace(SAID, token_ids=(5,)), "r, token at 1: expected 6, got nothing"),
        (replace(SAID, token_ids=(5, 6, 0)), "r, token at 2: expected nothing, got 0"),
        (replace(SAID, finish_reason=FinishReason.LENGTH), "r, finish_reason at 2: expected stop, got length"),
        (replace(SAID, stop_reason=None), "r, stop_reason at 2: expected 6, got nothing"),
    ],
)
def test_the_first_difference_is_found(got: Answer, text: str | None) -> None:
    same = replace(SAID)
    difference = compare({"q": SAID, "r": SAID}, {"r": got, "q": same})
    assert (difference if difference is None else str(difference)) == text


def test_a_logprob_that_is_off_by_one_bit_is_a_difference() -> None:
    other = replace(SAID, logprobs=(SAID.logprobs[0], TokenLogprob(6, -2.0000000000000004, 1)))
    difference = compare({"r": SAID}, {"r": other})
    assert difference is not None
    assert (difference.what, difference.position) == ("logprob", 1)


def test_an_answer_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        compare({"r": SAID}, {})


def test_ways_are_the_product() -> None:
    ways = all_variants()
    assert len({w.name for w in ways}) == len(ways)
    product = {
        (w.max_num_seqs, w.long_prefill_token_threshold, w.enable_prefix_caching, w.must_preempt)
        for w in ways
        if w.name.startswith("batch")
    }
    assert len(product) == 3 * 3 * 2 + 2 * 3 * 2
    assert {w.max_num_seqs for w in quick_variants()} == {1, 7, 64}
    assert {w.long_prefill_token_threshold for w in quick_variants()} == {0, 16, 64}
    assert {(w.must_hit, w.must_preempt) for w in quick_variants()} == {
        (x, y) for x in (False, True) for y in (False, True)
    }
    for way in (*ways, *quick_variants()):
        assert way.num_blocks * way.block_size >= USUAL_LENGTHS.whole, f"{way.name}: a request could never run"
        assert way.num_passes == 2 or not way.must_hit


def test_methods_get_a_column_per_length() -> None:
    some = [name for name in METHOD_NAMES if name not in FOLDER_METHODS and "auto-" not in name]
    assert [m.name for m in standard_methods(some, [1, 4])] == [
        "naive", "ngram k=1", "ngram k=4", "suffix k=1", "suffix k=4", "mtp k=1", "mtp k=4", "auto k=1", "auto k=4",
        "mtp-ngram k=4", "mtp-suffix k=4", "mixed k=4",
    ]  # fmt: skip
    [auto_mtp, auto_eagle3] = (method.speculative for method in standard_methods(["auto-mtp", "auto-eagle3"], [4]))
    assert (auto_mtp.draft_models, auto_eagle3.draft_models) == (("mtp",), ("eagle3",))
    mtp = SpeculativeConfig(method="mtp", model="dir", quantization="wint8", draft_head_quantization="target")
    hybrid = standard_methods(["mtp-suffix"], [4], mtp)[0].speculative
    assert (hybrid.method, hybrid.mtp_strategy, hybrid.model) == ("mtp", "with_suffix", "dir")
    assert (hybrid.quantization, hybrid.draft_head_quantization) == ("wint8", "target")
    assert 1 <= hybrid.num_model_steps < hybrid.num_speculative_tokens == 4
    with pytest.raises(ConfigError, match=r"methods: expected some of .*, got 'sufix' \(did you mean 'suffix'\?\)"):
        standard_methods(["sufix"], [1])
    with pytest.raises(ConfigError, match="num_speculative_tokens: expected at least 1, got 0"):
        standard_methods(["ngram"], [0])


def test_mixed_requests_choose_for_themselves() -> None:
    [mixed] = standard_methods(["mixed"], [3])
    requests = mixed.apply(make_requests(0, 10, 4096))
    options = [r.speculation for r in requests]
    assert options[:5] == options[5:]
    assert len(set(options)) == 5
    assert {w.enabled for w in options} == {True, False}
    assert [r.speculation for r in PLAIN.apply(make_requests(0, 2, 4096))] == [Speculation()] * 2


def test_an_engine_is_configured_by_way_and_method_only() -> None:
    base = Config(ModelConfig("demo", dtype="float32"), num_threads=3)
    [method] = standard_methods(["ngram"], [9])
    config = engine_config(base, EngineVariant("w", max_num_seqs=64, max_num_batched_tokens=100, num_threads=1), method)
    assert config.model == base.model
    assert config.scheduler.max_num_batched_tokens == 64 * 10
    assert (config.num_threads, config.speculative.num_speculative_tokens) == (1, 9)
    assert engine_config(base, EngineVariant("w"), PLAIN).num_threads == 3


def test_running_gives_every_request_its_answer() -> None:
    requests = [toy_request(f"r{i}", range(3 + i), max_tokens=4) for i in range(5)]
    executor = ToyExecutor(toy_info())
    answers = run(Engine(toy_config(max_num_seqs=2), executor), requests, arrivals_per_step=1)
    model = ToyModel(97)
    assert [list(answers[r.request_id].token_ids) for r in requests] == [model.generate(r) for r in requests]
    assert {a.finish_reason for a in answers.values()} == {FinishReason.LENGTH}


def matrix(**changes: object) -> Matrix:
    cells = [
        Cell("way 1", "naive"),
        Cell("way 2", "naive"),
        Cell("way 1", "ngram k=3", num_drafts=10, num_accepted=4, num_verifications=5, num_emitted=9),
        replace(Cell("way 2", "ngram k=3", num_drafts=2, num_verifications=1, num_emitted=1), **changes),  # type: ignore[arg-type]
    ]
    return Matrix(("way 1", "way 2"), ("naive", "ngram k=3"), {(c.way, c.method): c for c in cells})


def test_a_table_of_equal_cells() -> None:
    assert matrix_table(matrix()).splitlines() == [
        "                            naive  ngram k=3",
        "way 1                       ok     ok 1.80",
        "way 2                       ok     ok 1.00",
        "drafts accepted / verified  -      4 / 12",
    ]
    assert matrix().is_proof
    assert findings(matrix(), {}) == []


def test_a_narrow_table_is_cut_between_methods() -> None:
    tables = matrix_table(matrix(), width=40).split("\n\n")
    assert [table.splitlines()[0].split() for table in tables] == [["naive"], ["ngram", "k=3"]]
    assert all(table.splitlines()[1].startswith("way 1") for table in tables)


def test_a_difference_is_no_proof_and_is_told_in_full() -> None:
    broken = matrix(difference=Difference("r7", "token", 3, "11", "12"))
    assert not broken.is_proof
    assert "DIFFERS 1.00" in matrix_table(broken)
    assert findings(broken, {}) == ["DIFFERS: ngram k=3, way 2: r7, token at 3: expected 11, got 12"]
    document = matrix_json(broken, {"mtp k=1": "no weights"})
    assert document["is_proof"] is False
    assert document["cells"][3]["difference"]["position"] == 3
    assert document["unavailable"] == {"mtp k=1": "no weights"}


def test_what_was_not_exercised_is_no_proof() -> None:
    idle = replace(matrix(missing="no preemption"), idle_methods=("suffix k=1",), unforced_methods=("ngram k=3",))
    assert not idle.is_proof
    assert findings(idle, {"mtp k=1": "no weights", "mtp k=3": "no weights"}) == [
        "not shown: suffix k=1: nothing was drafted in any way",
        "not shown: ngram k=3: no token that a grammar forces was drafted in any way",
        "not shown: ngram k=3, way 2: no preemption",
        "not available: mtp k=1, mtp k=3: no weights",
    ]


@pytest.mark.parametrize(("num_accepted", "fate"), [(0, "accepted"), (10, "rejected")])
def test_drafts_with_one_fate_only_are_a_warning(num_accepted: int, fate: str) -> None:
    counts: dict[str, Any] = {"num_drafts": 10, "num_verifications": 5, "num_emitted": 5 + num_accepted}
    cell = Cell("way 1", "mtp k=2", num_accepted=num_accepted, **counts)
    column = Matrix(("way 1",), ("naive", "mtp k=2"), {("way 1", "mtp k=2"): cell})
    assert column.warnings == [f"mtp k=2: no draft was {fate} in any way"]
    assert column.is_proof
    assert findings(column, {}) == [
        f"WARNING: mtp k=2: no draft was {fate} in any way: equality was shown for the other kind only"
    ]
    assert matrix_json(column, {})["warnings"] == column.warnings


def test_both_fates_in_different_ways_are_no_warning() -> None:
    assert matrix().warnings == []
    half = matrix(num_drafts=2, num_accepted=2, num_emitted=3)
    assert half.warnings == []


def test_a_method_says_whether_it_may_draft() -> None:
    assert not PLAIN.is_drafting
    assert Method("m", SpeculativeConfig(method="ngram", num_speculative_tokens=2)).is_drafting
