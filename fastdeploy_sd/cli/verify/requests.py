"""The requests of the matrix: every sampling feature, prompts with and without repetition, some with a common start."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Adapter, Request

# Token ids that biases and stops name; below any vocabulary's size, and unlikely to be control tokens.
_LIKED, _ALSO_LIKED, _BANNED, _STOP = 5, 17, 99, 7
_MIN_TOKEN_ID = 4
_MIN_VOCAB_SIZE = 128
# The first requests have prompts and outputs as long as any, share no token and end at their limits only: what a way
# that must preempt counts on, see ways.blocks_for_preemption.
NUM_LONG = 2


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long requests are, in tokens.

    Attributes:
        shared: a prompt begins with nothing, some or all of so many tokens that others begin with.
        own: after these a prompt has one of so many of its own.
        output: most tokens of an answer, one of these.
    """

    shared: int = 70
    own: tuple[int, ...] = (1, 2, 9, 17, 40, 90)
    output: tuple[int, ...] = (1, 5, 20, 40)

    @classmethod
    def up_to(cls, prompt: int, output: int) -> Lengths:
        """Return shorter or longer ones, in proportion: the longest prompt and the longest answer are as said."""
        usual = cls()
        shared = usual.shared * prompt // usual.prompt
        own = [max(length * (prompt - shared) // max(usual.own), 1) for length in usual.own]
        return cls(shared, tuple(own), tuple(max(length * output // max(usual.output), 1) for length in usual.output))

    @property
    def prompt(self) -> int:
        """Of the longest prompt."""
        return self.shared + max(self.own)

    @property
    def whole(self) -> int:
        """Of the longest request, prompt and output."""
        return self.prompt + max(self.output)

    @property
    def long_prompt(self) -> int:
        """Of the first requests' prompts."""
        return max(self.own)

    @property
    def long(self) -> int:
        """Of the first requests, prompt and output."""
        return self.long_prompt + max(self.output)


USUAL_LENGTHS = Lengths()

# Name -> SamplingParams without what depends on the model's end-of-text id; `_WITH_EOS_BIAS` adds that.
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy-logprobs": {"temperature": 0.0, "logprobs": 3},
    "plain": {"temperature": 1.0},
    "hot-top-k": {"temperature": 1.7, "top_k": 20, "logprobs": 0, "prompt_logprobs": 0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "everything": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "logprobs": 5, "prompt_logprobs": 2},
    "penalties": {
        "temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 2,
    },
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 1.0},
    "bias": {"temperature": 0.6, "logit_bias": {_LIKED: 4.0, _ALSO_LIKED: 5.0, _BANNED: -100.0}},
    "min-tokens": {"temperature": 0.9, "min_tokens": 6, "stop_token_ids": (_STOP,)},
    "ends-early": {"temperature": 1.0},
}  # fmt: skip
_WITH_EOS_BIAS = {"min-tokens": 6.0, "ends-early": 7.0}


def make_requests(
    seed: int, count: int, vocab_size: int, eos_token_ids: Sequence[int] = (2,), lengths: Lengths = USUAL_LENGTHS
) -> list[Request]:
    """Return `count` requests, `r0` on, that take turns through all samplings.

    Half of the prompts are random ids, half repeat a short phrase, so that methods that copy from the text do draft. A
    prompt may start with a part of one common text, so that a prefix cache has something to find. Every fifth request
    has bad words. The same arguments give the same requests. Raises ValueError: a vocabulary below 128.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size: expected at least {_MIN_VOCAB_SIZE}, got {vocab_size}")
    rng = random.Random(seed)
    shared = _random_ids(rng, lengths.shared, vocab_size)
    requests = [_make_request(rng, i, shared, vocab_size, tuple(eos_token_ids), lengths) for i in range(count)]
    makers = (_random_ids, _phrase)  # in turn, as for the others
    requests[:NUM_LONG] = [
        _lengthened(request, make(rng, lengths.long_prompt, vocab_size), max(lengths.output))
        for request, make in zip(requests[:NUM_LONG], makers, strict=False)
    ]
    return requests


def sampling_name(index: int) -> str:
    """The key of SAMPLINGS that request `r<index>` uses."""
    return list(SAMPLINGS)[index % len(SAMPLINGS)]


def _make_request(
    rng: random.Random,
    i: int,
    shared: Sequence[int],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    lengths: Lengths,
) -> Request:
    # Turn about, shifted by one after each round, so that every sampling gets both kinds.
    is_repetitive = (i + i // len(SAMPLINGS)) % 2 == 1
    own_len = rng.choice(lengths.own)
    own = _phrase(rng, own_len, vocab_size) if is_repetitive else _random_ids(rng, own_len, vocab_size)
    prompt = [*shared[: rng.choice([0, 16, 33, lengths.shared])], *own]
    return Request(
        f"r{i}",
        np.array(prompt, np.int32),
        _sampling(sampling_name(i), eos_token_ids),
        max_tokens=rng.choice(lengths.output),
        seed=1000 + i,
        eos_token_ids=eos_token_ids,
        bad_words_token_ids=((own[0],), (own[-1], 11)) if i % 5 == 0 else (),
    )


def _lengthened(request: Request, prompt: list[int], num_outputs: int) -> Request:
    """The request with another prompt, the longest output and nothing that ends it before."""
    assert not request.sampling.stop_token_ids, "it may end early"
    token_ids = np.array(prompt, np.int32)
    return replace(request, prompt_token_ids=token_ids, max_tokens=num_outputs, eos_token_ids=())


def _sampling(name: str, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    values = dict(SAMPLINGS[name])
    if name in _WITH_EOS_BIAS and eos_token_ids:
        values["logit_bias"] = {eos_token_ids[0]: _WITH_EOS_BIAS[name]}
    return SamplingParams(**values)


def _random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(_MIN_TOKEN_ID, vocab_size) for _ in range(length)]


def _phrase(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """A phrase of 3 to 8 tokens over and over, cut to `length`."""
    phrase = _random_ids(rng, rng.randint(3, 8), vocab_size)
    return [phrase[i % len(phrase)] for i in range(length)]


# In the syntax of guidance.grammar: text that is forced, text with open ends, words of a list, a JSON schema.
GRAMMARS = (
    r'start: "{\"is_the_first_answer_right\": " ("true" | "false") ", \"number_of_answers\": " /[0-9]{1,3}/ "}"',
    r"start: /[a-z]{2,6}( [a-z]{2,6}){1,9}/",
    'start: CHOICE\nCHOICE: "positive" | "negative" | "neither of them"',
    'start: %json {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 6}',
)
# Of each seven requests; samplings, phrases and numbers of drafts come round in other numbers, so all of them meet.
_GUIDED_OF_SEVEN = (3, 6)


def with_adapters(requests: Sequence[Request], adapters: Sequence[Adapter]) -> list[Request]:
    """Return the requests with no adapter and each of these in turn."""
    return [replace(r, adapter=[None, *adapters][i % (len(adapters) + 1)]) for i, r in enumerate(requests)]


def with_grammars(requests: Sequence[Request], max_tokens: int) -> list[Request]:
    """Return the requests, some with a grammar and the longest output; not those that must not end before a length."""
    guided = [i for i, r in enumerate(requests) if i % 7 in _GUIDED_OF_SEVEN and not r.sampling.min_tokens]
    found = list(requests)
    for number, i in enumerate(guided):
        found[i] = replace(found[i], grammar=GRAMMARS[number % len(GRAMMARS)], max_tokens=max_tokens)
    return found
