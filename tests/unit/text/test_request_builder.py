"""RequestBuilder: every default is resolved, and nothing that does not fit is cut to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.sampling import MAX_BAD_WORD_CHARS, MAX_STOP_CHARS, SEED_LIMIT
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.request_builder import RequestBuilder
from fastdeploy_sd.types import ModelInfo, Speculation, SpeculationInfo
from tests.unit.text.vocabularies import golden_tokenizer

INFO = ModelInfo("m", vocab_size=4096, max_model_len=32, eos_token_ids=(2, 7), block_size=16, num_blocks=8)
BUILDER = RequestBuilder(PromptEncoder(golden_tokenizer()), INFO)


def test_defaults_are_resolved() -> None:
    [request] = BUILDER.build([[5, 6]], SamplingParams(), "id", priority=3, cache_salt="tenant")
    assert request.request_id == "id"
    assert request.prompt_token_ids.tolist() == [5, 6]
    assert request.max_tokens == 30
    assert request.eos_token_ids == (2, 7)
    assert (request.priority, request.cache_salt) == (3, "tenant")
    assert 0 <= request.seed < SEED_LIMIT
    assert request.arrival_time > 0


def test_random_seeds_differ() -> None:
    assert len({BUILDER.build([[5]], SamplingParams(), "id")[0].seed for _ in range(8)}) == 8


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (SEED_LIMIT - 1, [SEED_LIMIT - 1, 0, 1])])
def test_n_sequences_have_their_own_ids_and_seeds(seed: int, seeds: list[int]) -> None:
    requests = BUILDER.build([[5]], SamplingParams(n=3, seed=seed), "id")
    assert [r.request_id for r in requests] == ["id-0", "id-1", "id-2"]
    assert [r.seed for r in requests] == seeds


def test_bad_words_become_token_sequences() -> None:
    [request] = BUILDER.build([[5]], SamplingParams(bad_words=("foo", "bar")), "id")
    assert len(request.bad_words_token_ids) == 4
    assert all(request.bad_words_token_ids)


def test_spellings_beyond_the_vocabulary_cannot_occur_and_are_left_out() -> None:
    words = SamplingParams(bad_words=("foo", "bar"))
    [request] = BUILDER.build([[5]], words, "id")
    limit = max(max(ids) for ids in request.bad_words_token_ids)
    [few] = RequestBuilder(PromptEncoder(golden_tokenizer()), replace(INFO, vocab_size=limit)).build([[5]], words, "id")
    assert few.bad_words_token_ids == tuple(ids for ids in request.bad_words_token_ids if max(ids) < limit)
    assert 0 < len(few.bad_words_token_ids) < len(request.bad_words_token_ids)


def test_an_eos_of_the_tokenizer_beyond_the_vocabulary_is_ignored() -> None:
    info = replace(INFO, vocab_size=2, eos_token_ids=())
    assert 2 in golden_tokenizer().eos_token_ids
    [request] = RequestBuilder(PromptEncoder(golden_tokenizer()), info).build([[1]], SamplingParams(), "id")
    assert request.eos_token_ids == ()


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "message"),
    [
        ([], {}, "prompt", "prompt: expected at least one token, got none"),
        ([5, 4096], {}, "prompt_token_ids", "prompt_token_ids: expected token ids in 0..4095"),
        ([-1], {}, "prompt_token_ids", "got -1"),
        ([1 << 40], {}, "prompt_token_ids", "got 1099511627776"),
        ([5], {"stop_token_ids": [4096]}, "stop_token_ids", "stop_token_ids: expected token ids in 0..4095"),
        ([5], {"logit_bias": {"4096": 1.0}}, "logit_bias", "logit_bias: expected token ids in 0..4095"),
        ([5] * 32, {}, "prompt", r"too long: .* 31 tokens, as this .* is 32 tokens \(max_model_len\), got 32"),
        ([5] * 30, {"max_tokens": 3}, "max_tokens", r"at most 2, as this .* is 32 tokens .* prompt has 30, got 3"),
        ([5] * 30, {"min_tokens": 3}, "min_tokens", r"at most 2 \(what fits after the prompt\), got 3"),
        ([5], {"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop", "stop: expected strings of at most 1024 characters"),
        (
            [5],
            {"bad_words": "x" * (MAX_BAD_WORD_CHARS + 1)},
            "bad_words",
            "bad_words: expected strings of at most 1024",
        ),
        (
            [5],
            {"bad_words": ["x" * 976] * 256},
            "bad_words",
            "bad_words: expected words of at most 8192 tokens together",
        ),
        ([1 << 5000], {}, "prompt_token_ids", "got <an integer of 5001 bits>"),
    ],
)
def test_what_does_not_fit_is_refused(prompt: list[int], sampling: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        BUILDER.build([prompt], SamplingParams.from_dict(sampling), "id")
    assert caught.value.param == param


def test_a_prompt_that_just_fits_is_taken() -> None:
    assert BUILDER.build([[5] * 31], SamplingParams(max_tokens=1), "id")[0].max_tokens == 1


def test_priority_must_fit_its_message() -> None:
    with pytest.raises(BadRequest, match="priority: expected a 32-bit signed integer"):
        BUILDER.build([[5]], SamplingParams(), "id", priority=1 << 31)


def test_every_sequence_is_drafted_for_as_asked() -> None:
    info = replace(INFO, speculation=SpeculationInfo("mtp", ("naive", "ngram", "mtp"), 4))
    builder = RequestBuilder(PromptEncoder(golden_tokenizer()), info)
    asked = {"method": "ngram", "num_speculative_tokens": 2}
    requests = builder.build([[5]], SamplingParams(n=2), "id", speculation=asked)
    assert [r.speculation for r in requests] == [Speculation(method="ngram", num_speculative_tokens=2)] * 2
    with pytest.raises(BadRequest, match="started without speculation"):
        BUILDER.build([[5]], SamplingParams(), "id", speculation=asked)


def test_several_prompts_share_everything_but_their_length_and_seed() -> None:
    group = BUILDER.build([[5], [6, 7]], SamplingParams(n=2, bad_words=("foo",)), "id")
    assert [r.request_id for r in group] == ["id-0-0", "id-0-1", "id-1-0", "id-1-1"]
    assert [r.prompt_token_ids.tolist() for r in group] == [[5], [5], [6, 7], [6, 7]]
    assert [r.max_tokens for r in group] == [31, 31, 30, 30]
    assert group[1].seed == (group[0].seed + 1) % SEED_LIMIT != group[3].seed
    assert all(r.bad_words_token_ids is group.bad_words_token_ids for r in group)


class CountingEncoder(PromptEncoder):
    """Counts the words it encodes."""

    num_words = 0

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        self.num_words += 1
        return super().encode_bad_word(word)


def test_bad_words_are_encoded_once_whatever_the_number_of_prompts() -> None:
    encoder = CountingEncoder(golden_tokenizer())
    RequestBuilder(encoder, INFO).build([[5]] * 100, SamplingParams(n=8, bad_words=("foo", "bar")), "id")
    assert encoder.num_words == 2
