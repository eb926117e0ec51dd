"""A pretend language model and a decoding loop around the Verifier, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_sd.spec_decode.verify import VerifyRule
from fastdeploy_sd.types import DraftTokens, SamplingArrays, VerifyResult, offsets
from tests.unit.spec_decode.verification.one_step import verify_once

VOCAB = 61
IN_PROMPT = 1 << 30

# (committed tokens of a request) -> its drafts
Drafter = Callable[[list[int]], list[int]]


def logits_after(history: Sequence[int]) -> np.ndarray:
    """f32[V], a fixed function of the last three tokens."""
    rng = np.random.default_rng([7, *history[-3:]])
    return (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)


@dataclass
class Decoding:
    """Requests decoded together; `columns` are per-request sampling parameters, one entry per request each.

    Attributes:
        prompts: tokens of each request's prompt; `tokens` grow from them.
        logits_of: the model; a test may break it.
    """

    prompts: list[list[int]]
    columns: dict[str, np.ndarray]
    rule: VerifyRule = field(default_factory=VerifyRule)
    logits_of: Callable[[Sequence[int]], np.ndarray] = logits_after
    tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [list(prompt) for prompt in self.prompts]

    def counts(self) -> np.ndarray:
        counts = np.zeros((len(self.prompts), VOCAB), np.int32)
        for r, (prompt, tokens) in enumerate(zip(self.prompts, self.tokens, strict=True)):
            np.add.at(counts[r], tokens[len(prompt) :], 1)
            counts[r, prompt] |= IN_PROMPT
        return counts

    def sampling(self, num_rows: int) -> SamplingArrays:
        num_requests = len(self.prompts)
        off = dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "temperature"), 0.0)
        off |= {"repetition_penalty": 1.0, "top_p": 1.0}
        floats = {name: np.full(num_requests, value, np.float32) for name, value in off.items()}
        integers = {
            "top_k": np.zeros(num_requests, np.int32),
            "num_logprobs": np.full(num_requests, -1, np.int32),
            "count_rows": np.full(num_requests, -1, np.int32),
            "seed": np.zeros(num_requests, np.uint64),
            "table_rows": np.arange(num_requests, dtype=np.int32),
            "num_bias": np.zeros(num_requests, np.int32),
            "bias_token_ids": np.zeros((num_requests, 2), np.int32),
            "bias_values": np.zeros((num_requests, 2), np.float32),
            "cu_mask": np.zeros(num_rows + 1, np.int32),
            "mask_token_ids": np.zeros(0, np.int32),
            "allowed_rows": np.full(num_rows, -1, np.int32),
            "allowed_bits": np.zeros((0, 0), np.int32),
        }
        defaults: dict[str, Any] = {**floats, **integers}
        given = {name: np.asarray(value).astype(defaults[name].dtype) for name, value in self.columns.items()}
        return SamplingArrays(**(defaults | given), token_counts=self.counts())

    def logits(self, drafts: list[list[int]]) -> np.ndarray:
        histories = [tokens + d[:j] for tokens, d in zip(self.tokens, drafts, strict=True) for j in range(len(d) + 1)]
        return np.stack([self.logits_of(history) for history in histories])

    def step(self, drafts: list[list[int]]) -> tuple[VerifyResult, tuple[int, ...]]:
        """Verify the drafts and commit the output."""
        num_draft = np.array([len(d) for d in drafts])
        cu_num_logits = offsets(num_draft + 1)
        positions = np.concatenate([len(t) + np.arange(n + 1) for t, n in zip(self.tokens, num_draft, strict=True)])
        draft = DraftTokens(np.array([token for d in drafts for token in d], np.int32), offsets(num_draft))
        logits = self.logits(drafts)
        result, failed = verify_once(self.rule, logits, cu_num_logits, positions, draft, self.sampling(len(logits)))
        for r, tokens in enumerate(self.tokens):
            tokens.extend(result.row(r).tolist())
        return result, failed

    def run(self, num_tokens: int, drafter: Drafter) -> list[list[int]]:
        """Decode until every request has `num_tokens` outputs; return the first that many of each."""
        while min(map(len, self.outputs())) < num_tokens:
            self.step([drafter(tokens) for tokens in self.tokens])
        return [output[:num_tokens] for output in self.outputs()]

    def outputs(self) -> list[list[int]]:
        return [tokens[len(prompt) :] for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]
