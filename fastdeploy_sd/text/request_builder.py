"""Builds a RequestGroup from prompt ids and SamplingParams, checked against the model, all defaults resolved."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.requests import (
    context_limit,
    producible_eos,
    producible_words,
    verify_fits,
    verify_prediction_length,
)
from fastdeploy_sd.rules.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_CHARS,
    SEED_LIMIT,
    verify_token_ids,
)
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.speculation import SpeculationOptions, resolve_speculation
from fastdeploy_sd.types import EMPTY_I32, I32, Adapter, KvSource, ModelInfo, Pooling, Request, Speculation


@dataclass(frozen=True, slots=True, eq=False)
class RequestGroup(Sequence[Request]):
    """`sampling.n` sequences of every prompt, made one at a time: those of prompt p are requests p*n .. p*n + n-1.

    Prompts are i32[P]; `max_tokens` and `seeds` (of sequence 0; i has seed + i) are one per prompt.
    """

    request_id: str
    prompts: tuple[I32, ...]
    max_tokens: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    arrival_time: float
    cache_salt: str
    speculation: Speculation
    client: str = ""
    kv_source: KvSource | None = None
    output_token_ids: tuple[I32, ...] = ()
    grammar: str = ""
    prediction_token_ids: I32 = field(default_factory=lambda: EMPTY_I32)
    pooling: Pooling | None = None
    adapter: Adapter | None = None
    trace_context: str = ""

    def __len__(self) -> int:
        return len(self.prompts) * self.sampling.n

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        """Make request `index`, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        prompt, sequence = divmod(index, self.sampling.n)
        return Request(
            request_id=self._request_id(prompt, sequence),
            prompt_token_ids=self.prompts[prompt],
            sampling=self.sampling,
            max_tokens=self.max_tokens[prompt],
            seed=(self.seeds[prompt] + sequence) % SEED_LIMIT,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self.bad_words_token_ids,
            priority=self.priority,
            client=self.client,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
            speculation=self.speculation,
            output_token_ids=self.output_token_ids[index] if self.output_token_ids else EMPTY_I32,
            kv_source=self.kv_source,
            grammar=self.grammar,
            prediction_token_ids=self.prediction_token_ids,
            pooling=self.pooling,
            adapter=self.adapter,
            trace_context=self.trace_context,
        )

    def _request_id(self, prompt: int, sequence: int) -> str:
        suffixes = [str(prompt)] if len(self.prompts) > 1 else []
        suffixes += [str(sequence)] if self.sampling.n > 1 else []
        return "-".join([self.request_id, *suffixes])

    def num_entries(self, num_output_tokens: int) -> int:
        """How many log-probabilities an answer with so many output tokens has: of tokens, and of alternatives."""
        s = self.sampling
        num_prompt_tokens = 0 if s.prompt_logprobs is None else sum(map(len, self.prompts)) * s.n
        return num_output_tokens * (1 + (s.logprobs or 0)) + num_prompt_tokens * (1 + (s.prompt_logprobs or 0))

    def prompt_of(self, index: int) -> I32:
        """Return the prompt of request `index`."""
        return self.prompts[index // self.sampling.n]


_PRIORITY_LIMIT = 1 << 31


class RequestBuilder:
    """Builds Requests for one loaded model; `eos_token_ids` are the model's and the tokenizer's."""

    def __init__(
        self,
        encoder: PromptEncoder,
        model_info: ModelInfo,
        default_seed: int | None = None,
        default_max_tokens: int | None = None,
    ) -> None:
        """Build for `model_info`; the defaults are for requests without a seed and a `max_tokens`.

        None: a random seed each, and an output of all tokens that fit.
        """
        self._default_seed = default_seed
        self._default_max_tokens = default_max_tokens
        self._encoder = encoder
        self._info = model_info
        own_eos = producible_eos("tokenizer", encoder.tokenizer.eos_token_ids, model_info.vocab_size)
        self.eos_token_ids = tuple(dict.fromkeys((*model_info.eos_token_ids, *own_eos)))

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for a token."""
        return self._info.max_request_tokens - 1

    def verify_prompt_length(self, num_prompt_tokens: int) -> None:
        """Refuse an empty prompt, and one that leaves no room for a token, with BadRequest."""
        if num_prompt_tokens == 0:
            raise BadRequest("prompt: expected at least one token, got none", param="prompt")
        verify_fits(num_prompt_tokens, 1, *context_limit(self._info))

    def build(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        speculation: SpeculationOptions = None,
    ) -> RequestGroup:
        """Return the requests for `params.n` sequences of every prompt int[P]; `max_tokens` None means the default.

        Raises BadRequest where a token, a length or an option is beyond the model or the server; nothing is cut to fit.
        """
        self._verify_sampling(params)
        if not -_PRIORITY_LIMIT <= priority < _PRIORITY_LIMIT:
            raise BadRequest(f"priority: expected a 32-bit signed integer, got {priority}", param="priority")
        resolved = resolve_speculation(speculation, self._info.speculation)
        max_tokens = tuple(self._resolve_max_tokens(len(prompt), params) for prompt in prompts)
        return RequestGroup(
            request_id=request_id,
            prompts=tuple(self._verified_prompt(prompt) for prompt in prompts),
            max_tokens=max_tokens,
            sampling=params,
            seeds=tuple(self._resolve_seed(params) for _ in prompts),
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self._encode_bad_words(params.bad_words),
            priority=priority,
            arrival_time=time.time(),
            cache_salt=cache_salt,
            speculation=resolved,
        )

    def with_prediction(self, requests: RequestGroup, text: str) -> RequestGroup:
        """Return the requests with what each of them is expected to generate, "" = nothing; raises BadRequest."""
        if not text:
            return requests
        limit = self._info.max_model_len
        token_ids = self._encoder.encode_prediction(text, limit)
        verify_prediction_length(len(token_ids), limit)
        self._verify_ids("prediction", token_ids)
        return replace(requests, prediction_token_ids=np.asarray(token_ids, np.int32))

    def _resolve_seed(self, params: SamplingParams) -> int:
        seed = self._default_seed if params.seed is None else params.seed
        return secrets.randbits(63) if seed is None else seed

    def _verify_sampling(self, params: SamplingParams) -> None:
        self._verify_ids("stop_token_ids", params.stop_token_ids)
        self._verify_ids("logit_bias", params.logit_bias)
        _verify_lengths("stop", params.stop, MAX_STOP_CHARS)
        _verify_lengths("bad_words", params.bad_words, MAX_BAD_WORD_CHARS)

    def _encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        sequences: list[tuple[int, ...]] = []
        num_tokens = 0
        for word in words:
            spellings = self._encoder.encode_bad_word(word)
            num_tokens += sum(map(len, spellings))
            if num_tokens > MAX_BAD_WORD_TOKENS:  # said before the rest is encoded
                raise BadRequest(
                    f"bad_words: expected words of at most {MAX_BAD_WORD_TOKENS} tokens together in all their spellings"
                    " (at the start of a line and after a space), got more",
                    param="bad_words",
                )
            sequences += spellings
        return producible_words(sequences, self._info.vocab_size)

    def _verified_prompt(self, prompt_token_ids: Sequence[int]) -> I32:
        self._verify_ids("prompt_token_ids", prompt_token_ids)
        return np.asarray(prompt_token_ids, np.int32)

    def _verify_ids(self, name: str, token_ids: Collection[int]) -> None:
        verify_token_ids(name, token_ids, self._info.vocab_size)

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        self.verify_prompt_length(num_prompt_tokens)
        limit, source = context_limit(self._info)
        max_tokens, default = params.max_tokens, self._default_max_tokens
        if max_tokens is None:
            max_tokens = limit - num_prompt_tokens
            if default is not None:
                max_tokens = min(max_tokens, max(default, params.min_tokens))
        max_tokens = max(max_tokens, 1)
        verify_fits(num_prompt_tokens, max_tokens, limit, source)
        if params.min_tokens > max_tokens:
            raise BadRequest(
                f"min_tokens: expected at most {max_tokens} (what fits after the prompt), got {params.min_tokens}",
                param="min_tokens",
            )
        return max_tokens


def _verify_lengths(name: str, texts: Iterable[str], limit: int) -> None:
    for text in texts:
        if len(text) > limit:
            raise BadRequest(
                f"{name}: expected strings of at most {limit} characters, got one of {len(text)}", param=name
            )
