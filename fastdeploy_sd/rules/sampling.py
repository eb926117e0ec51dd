"""The rules of the columns that sampling reads: types, ranges and limits, each stated once. Knows no request.

The kernels check the same ranges for themselves, and tests drive them to both sides of every edge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.errors import BadRequest, shown

MAX_COUNT = (1 << 31) - 1  # what a 32-bit column holds
SEED_LIMIT = 1 << 63
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of each
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024  # of each
# Every spelling of every bad word together: 16 tokens for each of two spellings. They are looked at per logits row.
MAX_BAD_WORD_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class NumberRule:
    """Which numbers a column takes.

    Attributes:
        dtype: of the column. A float must be in the range after rounding to this type, as the kernels see it.
        low, high: the range, both ends included unless `is_low_open`.
    """

    dtype: type[np.float32 | np.int32 | np.uint64]
    low: float
    high: float
    is_low_open: bool = False

    @property
    def is_float(self) -> bool:
        """Whether the column has more than integers."""
        return self.dtype is np.float32

    @property
    def wanted(self) -> str:
        """The rule in words."""
        kind = "a number" if self.is_float else "an integer"
        low, high = (f"{end:.10g}" if self.is_float else str(end) for end in (self.low, self.high))
        return f"{kind} in ({low}, {high}]" if self.is_low_open else f"{kind} in {low}..{high}"

    def accepts(self, value: object) -> bool:
        """Whether a value may go into the column."""
        types = (int, float) if self.is_float else (int,)
        if isinstance(value, bool) or not isinstance(value, types) or not self.low <= value <= self.high:
            return False
        return not self.is_low_open or bool(self.dtype(value) > self.dtype(self.low))

    def verify(self, name: str, value: object) -> None:
        """Check the value of a field; raises BadRequest."""
        if not self.accepts(value):
            raise BadRequest(f"{name}: expected {self.wanted}, got {shown(value)}", param=name)


# Field of SamplingParams -> its rule; of logit_bias for every value in it.
NUMBER_RULES: Mapping[str, NumberRule] = {
    "n": NumberRule(np.int32, 1, MAX_N),
    "temperature": NumberRule(np.float32, 0.0, 1e6),
    "top_p": NumberRule(np.float32, 0.0, 1.0, is_low_open=True),
    "top_k": NumberRule(np.int32, 0, MAX_COUNT),
    "min_p": NumberRule(np.float32, 0.0, 1.0),
    "repetition_penalty": NumberRule(np.float32, 1e-3, 1e3),
    "presence_penalty": NumberRule(np.float32, -2.0, 2.0),
    "frequency_penalty": NumberRule(np.float32, -2.0, 2.0),
    "logit_bias": NumberRule(np.float32, -100.0, 100.0),
    "min_tokens": NumberRule(np.int32, 0, MAX_COUNT),
    "max_tokens": NumberRule(np.int32, 0, MAX_COUNT),
    "stop_token_ids": NumberRule(np.int32, 0, MAX_COUNT),
    "seed": NumberRule(np.uint64, 0, SEED_LIMIT - 1),
    "logprobs": NumberRule(np.int32, 0, MAX_LOGPROBS),
    "prompt_logprobs": NumberRule(np.int32, 0, MAX_LOGPROBS),
}

# What takes a token at least: the room of a request, and the answer to a chat.
SOME_TOKENS = replace(NUMBER_RULES["max_tokens"], low=1)


def verify_count(name: str, items: Collection[object], limit: int) -> None:
    """Check how many entries a field has; raises BadRequest."""
    if len(items) > limit:
        raise BadRequest(f"{name}: expected at most {limit} entries, got {len(items)}", param=name)


def verify_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Check ids that the kernels look up in the vocabulary; raises BadRequest."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"{name}: expected token ids in 0..{vocab_size - 1} (the vocabulary), got {shown(token_id)}", param=name
            )
