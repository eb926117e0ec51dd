"""verify: the output is what plain decoding gives, whatever the drafts; failures stay with their request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest

from fastdeploy_sd.ops.reference import sampling as reference
from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.types import DraftTokens
from tests.unit.spec_decode.verification.decoding import VOCAB, Decoding, Drafter, logits_after
from tests.unit.spec_decode.verification.one_step import verify_once

NUM_TOKENS = 40
PROMPTS = [[1, 2, 3, 2], [5], [9, 9, 9, 9, 9, 9], [4, 8], [20, 21, 22]]
# Greedy, plain sampling, every filter, every penalty, and all of it with a bias.
COLUMNS = {
    "temperature": np.array([0.0, 1.0, 0.8, 0.7, 1.5]),
    "top_k": np.array([0, 0, 12, 0, 30]),
    "top_p": np.array([1.0, 1.0, 0.9, 1.0, 0.95]),
    "min_p": np.array([0.0, 0.0, 0.01, 0.0, 0.001]),
    "seed": np.array([1, 2, 3, 2**63, 5], np.uint64),
    "count_rows": np.array([-1, -1, -1, 3, 4]),
    "repetition_penalty": np.array([1.0, 1.0, 1.0, 1.4, 1.1]),
    "presence_penalty": np.array([0.0, 0.0, 0.0, 0.5, 0.2]),
    "frequency_penalty": np.array([0.0, 0.0, 0.0, 0.6, 1.0]),
}
Strategy = Literal["target_match", "greedy", "topp"]
Policy = Literal["normal", "accept_all", "reject_all"]
DrafterKind = Callable[[list[list[int]], int], Drafter]
# Of the last request.
BIAS = {
    "num_bias": np.array([0, 0, 0, 0, 2]),
    "bias_token_ids": np.tile([7, 30], (5, 1)),
    "bias_values": np.tile([3.0, -100.0], (5, 1)),
}
ALL_COLUMNS = COLUMNS | BIAS


def plain_decoding() -> list[list[int]]:
    """One token at a time by the definition of the ops, each request alone."""
    outputs = []
    for r, prompt in enumerate(PROMPTS):
        columns = {name: value[r : r + 1] for name, value in ALL_COLUMNS.items()}
        columns["count_rows"] = np.minimum(columns["count_rows"], 0)
        alone = Decoding([prompt], columns)
        for _ in range(NUM_TOKENS):
            sampling = alone.sampling(1)
            position = np.array([len(alone.tokens[0])])
            alone.tokens[0] += reference.sample(alone.logits([[]]), np.array([0]), position, sampling).tolist()
        outputs.append(alone.outputs()[0])
    return outputs


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return plain_decoding()


def oracle(plain: list[list[int]], length: int) -> Drafter:
    """Drafts exactly what plain decoding will output."""
    sequences = [[*prompt, *output] for prompt, output in zip(PROMPTS, plain, strict=True)]

    def draft(tokens: list[int]) -> list[int]:
        (known,) = [s for s, prompt in zip(sequences, PROMPTS, strict=True) if tokens[: len(prompt)] == prompt]
        return known[len(tokens) :][:length]

    return draft


def wrong(plain: list[list[int]], length: int) -> Drafter:
    """Drafts anything but that."""
    right = oracle(plain, length)
    return lambda tokens: [(token + 1) % VOCAB for token in right(tokens)]


def mixed(plain: list[list[int]], length: int) -> Drafter:
    """Drafts of any length that go wrong anywhere and may repeat a token."""
    right, rng = oracle(plain, length), np.random.default_rng(12)

    def draft(tokens: list[int]) -> list[int]:
        drafts = right(tokens)[: rng.integers(0, length + 1)]
        keep = int(rng.integers(0, length + 1))
        return drafts[:keep] + [int(rng.choice(tokens)) for _ in drafts[keep:]]

    return draft


def test_without_drafts_the_output_is_plain_decoding(plain: list[list[int]]) -> None:
    assert Decoding(PROMPTS, ALL_COLUMNS).run(NUM_TOKENS, lambda tokens: []) == plain


@pytest.mark.parametrize("drafter", [oracle, wrong, mixed])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_drafts_never_change_the_output(plain: list[list[int]], drafter: DrafterKind, length: int) -> None:
    assert Decoding(PROMPTS, ALL_COLUMNS).run(NUM_TOKENS, drafter(plain, length)) == plain


def test_right_drafts_are_all_accepted_and_wrong_ones_all_rejected(plain: list[list[int]]) -> None:
    num_requests = len(PROMPTS)
    for drafter, accepted in ((oracle, 4), (wrong, 0)):
        decoding = Decoding(PROMPTS, ALL_COLUMNS)
        result, failed = decoding.step([drafter(plain, 4)(tokens) for tokens in decoding.tokens])
        assert result.num_accepted.tolist() == [accepted] * num_requests
        assert np.diff(result.cu_num_output).tolist() == [accepted + 1] * num_requests
        assert failed == ()


def test_greedy_takes_the_most_likely_token_at_any_temperature() -> None:
    decoding = Decoding([[1], [2]], {"temperature": np.array([1.0, 50.0])}, rule=VerifyRule("greedy"))
    histories = ([1], [2])
    result, _ = decoding.step([[], []])
    assert result.token_ids.tolist() == [int(np.argmax(logits_after(h))) for h in histories]


def test_greedy_output_does_not_depend_on_the_drafts(plain: list[list[int]]) -> None:
    outputs = [
        Decoding(PROMPTS, ALL_COLUMNS, rule=VerifyRule("greedy")).run(20, drafter)
        for drafter in (lambda tokens: [], lambda tokens: [int(np.argmax(logits_after(tokens))), 3])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] != [output[:20] for output in plain]


@pytest.mark.parametrize(
    ("rule", "lossy"),
    [
        (VerifyRule(), False),
        (VerifyRule(accept_policy="reject_all"), False),
        (VerifyRule(accept_policy="accept_all"), True),
        (VerifyRule("greedy"), True),
        (VerifyRule("topp"), True),
    ],
)
def test_only_target_match_that_looks_at_drafts_or_drops_them_is_lossless(rule: VerifyRule, lossy: bool) -> None:
    assert rule.is_lossy == lossy


def test_reject_all_gives_plain_decoding_one_token_per_step(plain: list[list[int]]) -> None:
    decoding = Decoding(PROMPTS, ALL_COLUMNS, rule=VerifyRule(accept_policy="reject_all"))
    for _ in range(6):
        result, _ = decoding.step([oracle(plain, 3)(tokens) for tokens in decoding.tokens])
        assert result.num_accepted.tolist() == [0] * len(PROMPTS)
    assert decoding.outputs() == [output[:6] for output in plain]


@pytest.mark.parametrize("strategy", ["target_match", "greedy", "topp"])
def test_accept_all_emits_the_drafts_whatever_they_are(plain: list[list[int]], strategy: Strategy) -> None:
    decoding = Decoding(PROMPTS, ALL_COLUMNS, rule=VerifyRule(strategy, "accept_all"))
    drafts = [wrong(plain, 3)(tokens) for tokens in decoding.tokens]
    result, failed = decoding.step(drafts)
    assert failed == ()
    assert [result.row(r)[:-1].tolist() for r in range(len(PROMPTS))] == drafts
    assert result.num_accepted.tolist() == [3] * len(PROMPTS)


def break_after(broken: tuple[int, ...]) -> Callable[[Sequence[int]], np.ndarray]:
    def logits_of(history: Sequence[int]) -> np.ndarray:
        return np.full(VOCAB, np.nan, np.float32) if tuple(history[-len(broken) :]) == broken else logits_after(history)

    return logits_of


def test_a_request_fails_alone_and_after_the_output_of_plain_decoding(plain: list[list[int]]) -> None:
    prompts = PROMPTS[:3]
    columns = {name: COLUMNS[name][:3] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    drafts = [output[:2] for output in plain[:3]]
    broken_history = (*prompts[1], *drafts[1])
    decoding = Decoding(prompts, columns, logits_of=break_after(broken_history))
    result, failed = decoding.step(drafts)
    assert failed == ()
    assert result.num_accepted.tolist() == [2, 1, 2]
    assert [result.row(r).tolist() for r in range(3)] == [plain[0][:3], plain[1][:2], plain[2][:3]]
    result, failed = decoding.step([[], [3], []])
    assert failed == (1,)
    assert result.num_accepted.tolist() == [0, 0, 0]
    assert [result.row(r).tolist() for r in range(3)] == [plain[0][3:4], [], plain[2][3:4]]


@pytest.mark.parametrize("strategy", ["target_match", "greedy", "topp"])
@pytest.mark.parametrize(("policy", "num_used"), [("normal", 3), ("accept_all", 4), ("reject_all", 1)])
@pytest.mark.parametrize("broken", range(4))
def test_a_broken_row_fails_its_request_where_it_is_used(
    strategy: Strategy, policy: Policy, num_used: int, broken: int
) -> None:
    """Greedy requests with drafts right, right, wrong: rows 0, 1 and 2 are used, or all or one without a judgement.

    Judged by equality, the rows from the broken one on are not used, unless it is the first.
    """
    prompts, zero = [[1, 2], [5], [9]], {"temperature": np.zeros(3)}
    right = Decoding(prompts, zero).run(4, lambda tokens: [])
    drafts = [[a, b, (c + 1) % VOCAB] for a, b, c, _ in right]
    rule = VerifyRule(strategy, policy)
    whole, _ = Decoding(prompts, zero, rule=rule).step(drafts)
    history = (*prompts[1], *drafts[1][:broken])
    result, failed = Decoding(prompts, zero, rule=rule, logits_of=break_after(history)).step(drafts)
    num_output = len(whole.row(1))
    if broken < num_used:
        num_output = broken if strategy != "topp" and policy == "normal" else 0
    assert failed == (() if num_output else (1,))
    for r in range(3):
        expected = whole.row(r).tolist()[: num_output if r == 1 else None]
        assert result.row(r).tolist() == expected
        assert result.num_accepted[r] == max(0, len(expected) - 1)


def test_a_broken_row_after_a_rejected_draft_is_not_used(plain: list[list[int]]) -> None:
    wrong_draft = (plain[1][0] + 1) % VOCAB
    columns = {name: COLUMNS[name][1:2] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    decoding = Decoding([PROMPTS[1]], columns, logits_of=break_after((*PROMPTS[1], wrong_draft)))
    result, failed = decoding.step([[wrong_draft]])
    assert failed == ()
    assert result.token_ids.tolist() == plain[1][:1]


def test_logprobs_are_of_raw_logits_for_outputs_of_requests_that_asked(plain: list[list[int]]) -> None:
    columns = ALL_COLUMNS | {"num_logprobs": np.array([2, -1, 0, 5, -1])}
    drafts = [output[:2] for output in plain]
    drafts[2] = [(plain[2][0] + 1) % VOCAB]
    result, _ = Decoding(PROMPTS, columns).step(drafts)
    assert result.logprobs is not None
    assert result.logprobs.top_token_ids.shape == (len(result.token_ids), 5)
    for r, (prompt, num_logprobs) in enumerate(zip(PROMPTS, columns["num_logprobs"], strict=True)):
        outputs = slice(result.cu_num_output[r], result.cu_num_output[r + 1])
        if num_logprobs < 0:
            assert np.isnan(result.logprobs.logprobs[outputs]).all()
            continue
        raw = np.stack([logits_after([*prompt, *plain[r][:j]]) for j in range(len(result.row(r)))])
        logprobs, ranks, top_token_ids, top_logprobs = reference.token_logprobs(
            raw, np.arange(len(raw)), result.row(r), 5
        )
        np.testing.assert_allclose(result.logprobs.logprobs[outputs], logprobs, rtol=1e-6)
        np.testing.assert_array_equal(result.logprobs.ranks[outputs], ranks)
        np.testing.assert_array_equal(result.logprobs.top_token_ids[outputs], top_token_ids)
        np.testing.assert_allclose(result.logprobs.top_logprobs[outputs], top_logprobs, rtol=1e-6)


def test_logprobs_are_absent_when_nobody_asks() -> None:
    result, _ = Decoding([[1]], {}).step([[]])
    assert result.logprobs is None


def test_more_alternatives_than_tokens_are_the_whole_vocabulary() -> None:
    decoding = Decoding([[1]], {"num_logprobs": np.array([VOCAB + 9])})
    result, _ = decoding.step([[]])
    assert result.logprobs is not None
    assert sorted(result.logprobs.top_token_ids[0].tolist()) == list(range(VOCAB))


def test_an_unfinished_prompt_has_no_output() -> None:
    sampling = Decoding([[1], [2]], {}).sampling(1)
    positions, cu_num_logits = np.array([1], np.int32), np.array([0, 0, 1], np.int32)
    result, failed = verify_once(
        VerifyRule(), logits_after([2])[None], cu_num_logits, positions, DraftTokens.none(2), sampling
    )
    assert result.cu_num_output.tolist() == [0, 0, 1]
    assert failed == ()
