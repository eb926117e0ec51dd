"""What a Request must be for one loaded model, so that no column of it can be refused inside a step.

The frontend builds requests that keep these rules; the engine verifies them, and the worker when it takes the columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from fastdeploy_sd.errors import BadRequest, shown
from fastdeploy_sd.rules.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBER_RULES,
    SOME_TOKENS,
    NumberRule,
    verify_count,
    verify_token_ids,
)
from fastdeploy_sd.types import ModelInfo, Request

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 256
MAX_SALT_CHARS = 256
MAX_CLIENT_CHARS = 272
MAX_TRACE_CHARS = 55
MAX_SOURCE_CHARS = 256
MAX_GRAMMAR_CHARS = 1 << 17
MAX_EOS_TOKEN_IDS = 4096
_CONTEXT = "max_model_len"
_TOO_LONG = "context_length_exceeded"
# The longest forms on a wire.
_MAX_ID_BYTES = _MAX_HEADER_BYTES = 5
_MAX_CHAR_BYTES = 4
_MAX_NUMBER_BYTES = 9
_NUM_OTHER_FIELDS = 256
_PER_ROW = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_PRIORITY = NumberRule(NUMBER_RULES["stop_token_ids"].dtype, -MAX_COUNT - 1, MAX_COUNT)


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The rules of one model; `max_model_len` is of prompt and output together."""

    vocab_size: int
    max_model_len: int

    @property
    def max_request_bytes(self) -> int:
        """Bytes of any request that keeps the rules, its numbers and texts in any usual form."""
        num_ids = MAX_BAD_WORD_TOKENS + MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS + MAX_LOGIT_BIAS
        num_chars = (
            MAX_STOP_STRINGS * MAX_STOP_CHARS
            + MAX_BAD_WORDS * MAX_BAD_WORD_CHARS
            + MAX_ID_CHARS
            + MAX_SALT_CHARS
            + MAX_CLIENT_CHARS
            + MAX_TRACE_CHARS
        ) + (2 * MAX_SOURCE_CHARS + MAX_GRAMMAR_CHARS)
        num_lists = MAX_BAD_WORD_TOKENS + MAX_STOP_STRINGS + MAX_BAD_WORDS
        return (
            _MAX_ID_BYTES * (2 * self.max_model_len + num_ids)
            + _MAX_CHAR_BYTES * num_chars
            + _MAX_HEADER_BYTES * num_lists
            + _MAX_NUMBER_BYTES * (MAX_LOGIT_BIAS + _NUM_OTHER_FIELDS)
        )

    def verify(self, request: Request) -> None:
        """Check everything that a step reads of a request, in some microseconds; raises BadRequest naming the field."""
        self._verify_sampling(request)
        self._verify_ids(request)
        self._verify_length(request)
        _verify_texts(request)

    def _verify_sampling(self, request: Request) -> None:
        sampling = request.sampling
        for name in _PER_ROW:
            NUMBER_RULES[name].verify(name, getattr(sampling, name))
        NUMBER_RULES["seed"].verify("seed", request.seed)
        SOME_TOKENS.verify("max_tokens", request.max_tokens)
        _PRIORITY.verify("priority", request.priority)
        for name, value in (
            ("logprobs", sampling.logprobs),
            ("prompt_logprobs", sampling.prompt_logprobs),
            ("num_draft_logprobs", request.speculation.num_draft_logprobs),
        ):
            if value is not None:
                NUMBER_RULES["logprobs"].verify(name, value)
        for bias in sampling.logit_bias.values():
            NUMBER_RULES["logit_bias"].verify("logit_bias", bias)

    def _verify_ids(self, request: Request) -> None:
        if request.grammar and not request.eos_token_ids:
            raise BadRequest("eos_token_ids: expected at least one with a grammar, got none", param="eos_token_ids")
        sampling, words = request.sampling, request.bad_words_token_ids
        verify_count("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)
        verify_count("eos_token_ids", request.eos_token_ids, MAX_EOS_TOKEN_IDS)
        num_tokens = sum(map(len, words))
        if num_tokens > MAX_BAD_WORD_TOKENS or not all(words):
            wanted = f"words of 1 token or more, at most {MAX_BAD_WORD_TOKENS} together in all their spellings"
            raise BadRequest(f"bad_words: expected {wanted}, got {num_tokens} in {len(words)}", param="bad_words")
        verify_token_ids("logit_bias", sampling.logit_bias, self.vocab_size)
        verify_token_ids("stop_token_ids", sampling.stop_token_ids, self.vocab_size)
        verify_token_ids("eos_token_ids", request.eos_token_ids, self.vocab_size)
        for word in words:
            verify_token_ids("bad_words", word, self.vocab_size)

    def _verify_length(self, request: Request) -> None:
        prompt, max_tokens = request.prompt_token_ids, request.max_tokens
        if len(prompt) == 0:
            raise BadRequest("prompt: expected at least one token, got none", param="prompt")
        outputs, predicted = request.output_token_ids, request.prediction_token_ids
        for name, ids in (("prompt_token_ids", prompt), ("output_token_ids", outputs), ("prediction", predicted)):
            if len(ids):  # the extremes, not a Python object per token
                verify_token_ids(name, (int(ids.min()), int(ids.max())), self.vocab_size)
        verify_prediction_length(len(predicted), self.max_model_len)
        if len(outputs) >= max_tokens:
            raise BadRequest(
                f"output_token_ids: expected fewer tokens than max_tokens ({max_tokens}), got {len(outputs)}",
                param="output_token_ids",
            )
        verify_fits(len(prompt), max_tokens, self.max_model_len, _CONTEXT)


def verify_fits(num_prompt_tokens: int, max_tokens: int, limit: int, source: str) -> None:
    """Check that prompt and output fit into `limit` tokens, which `source` sets; raises BadRequest."""
    if num_prompt_tokens >= limit:
        raise prompt_too_long(limit, num_prompt_tokens, source)
    if num_prompt_tokens + max_tokens > limit:
        raise BadRequest(
            f"max_tokens: expected at most {limit - num_prompt_tokens}, as {_context_length(limit, source)} and the"
            f" prompt has {num_prompt_tokens}, got {max_tokens} ({_TOO_LONG})",
            param="max_tokens",
            code=_TOO_LONG,
        )


def context_limit(info: ModelInfo) -> tuple[int, str]:
    """Return how many tokens a request may have, prompt and output together, and what sets that limit."""
    limit = info.max_request_tokens
    return limit, _CONTEXT if limit == info.max_model_len else "what the KV cache holds"


def prompt_too_long(limit: int, got: object, source: str = "", param: str = "prompt") -> BadRequest:
    """Return the error of a prompt of `got` tokens, or words about them, that does not fit into `limit` tokens.

    Clients look for these words and compact the conversation or choose another model then.
    """
    text = f"prompt is too long: expected at most {limit - 1} tokens, as {_context_length(limit, source)}, got {got}"
    return BadRequest(text, param=param, code=_TOO_LONG)


def _context_length(limit: int, source: str) -> str:
    return f"this model's maximum context length is {limit} tokens" + (f" ({source})" if source else "")


def verify_grammar_length(num_chars: int, field: str) -> None:
    """Check that a grammar may go to an engine; raises BadRequest for the client's `field`."""
    if num_chars > MAX_GRAMMAR_CHARS:
        text = f"{field}: expected what takes a grammar of at most {MAX_GRAMMAR_CHARS} characters, got {num_chars}"
        raise BadRequest(text, param=field.partition(".")[0])


def verify_prediction_length(num_tokens: int, max_model_len: int) -> None:
    """Check that a predicted output fits into the model's context; raises BadRequest."""
    if num_tokens > max_model_len:
        text = f"prediction: expected at most max_model_len ({max_model_len}) tokens, got {num_tokens}"
        raise BadRequest(text, param="prediction", code=_TOO_LONG)


def _verify_texts(request: Request) -> None:
    for name, text, limit in (
        ("request_id", request.request_id, MAX_ID_CHARS),
        ("cache_salt", request.cache_salt, MAX_SALT_CHARS),
        ("client", request.client, MAX_CLIENT_CHARS),
        ("trace_context", request.trace_context, MAX_TRACE_CHARS),
        ("grammar", request.grammar, MAX_GRAMMAR_CHARS),
    ):
        _verify_text(name, text, limit)
    if request.kv_source is not None:
        _verify_text("kv_source", request.kv_source.instance_id, MAX_SOURCE_CHARS)
        _verify_text("kv_source", request.kv_source.address, MAX_SOURCE_CHARS)
    verify_count("stop", request.sampling.stop, MAX_STOP_STRINGS)
    verify_count("bad_words", request.sampling.bad_words, MAX_BAD_WORDS)
    for text in request.sampling.stop:
        _verify_text("stop", text, MAX_STOP_CHARS)
    for text in request.sampling.bad_words:
        _verify_text("bad_words", text, MAX_BAD_WORD_CHARS)


def _verify_text(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise BadRequest(f"{name}: expected at most {limit} characters, got {shown(text)}", param=name)


def producible_eos(origin: str, token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids that a model can produce; those beyond its vocabulary end nothing, which a log line says."""
    found = tuple(dict.fromkeys(token_ids))
    beyond = [i for i in found if i >= vocab_size]
    if beyond:
        logger.warning("%s: EOS ids beyond the vocabulary of %d end nothing: %s", origin, vocab_size, shown(beyond))
    return tuple(i for i in found if i < vocab_size)


def producible_words(words: Iterable[tuple[int, ...]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the spellings of bad words that a model can produce: a tokenizer may know more ids than its model."""
    return tuple(word for word in words if all(0 <= i < vocab_size for i in word))
