"""A pretend language model and a decoding loop around the Verifier, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdeploy_sd.ops.native.batch import BatchRows, prepare_batch
from fastdeploy_sd.sampling.verify import Verifier, VerifyRule
from fastdeploy_sd.types import Batch, DraftTokens, SamplingArrays, VerifyResult

VOCAB = 61
BLOCK_SIZE = 16
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
    verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [list(prompt) for prompt in self.prompts]
        self.verifier = Verifier(self.rule)

    def counts(self) -> np.ndarray:
        counts = np.zeros((len(self.prompts), VOCAB), np.int32)
        for r, (prompt, tokens) in enumerate(zip(self.prompts, self.tokens, strict=True)):
            np.add.at(counts[r], tokens[len(prompt) :], 1)
            counts[r, prompt] |= IN_PROMPT
        return counts

    def batch(self, drafts: list[list[int]]) -> Batch:
        """One decoding step: the last committed token of every request and its drafts."""
        num_requests = len(self.prompts)
        num_draft = np.array([len(d) for d in drafts])
        known = np.array([len(t) for t in self.tokens]) + num_draft
        cu_num_draft = np.concatenate([[0], np.cumsum(num_draft)]).astype(np.int32)
        draft = DraftTokens(np.array([token for d in drafts for token in d], np.int32), cu_num_draft)
        max_blocks = -(-int(known.max()) // BLOCK_SIZE)
        table = np.zeros((num_requests, known.max()), np.int32)
        for r, tokens in enumerate(self.tokens):
            table[r, : len(tokens)] = tokens
        rows = BatchRows(
            num_computed=(known - num_draft - 1).astype(np.int32),
            num_new=(num_draft + 1).astype(np.int32),
            num_known=known.astype(np.int32),
            slots=np.arange(num_requests, dtype=np.int32),
            draft=draft,
            block_tables=np.arange(num_requests * max_blocks, dtype=np.int32).reshape(num_requests, max_blocks),
        )
        maps = prepare_batch(rows, table, BLOCK_SIZE)
        return Batch(
            request_ids=tuple(str(r) for r in range(num_requests)),
            block_tables=rows.block_tables,
            draft=draft,
            sampling=self.sampling(len(maps.logits_indices)),
            **maps._asdict(),
        )

    def sampling(self, num_rows: int) -> SamplingArrays:
        num_requests = len(self.prompts)
        off = dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "temperature"), 0.0)
        off |= {"repetition_penalty": 1.0, "top_p": 1.0}
        floats = {name: np.full(num_requests, value, np.float32) for name, value in off.items()}
        integers = {
            "top_k": np.zeros(num_requests, np.int32),
            "num_logprobs": np.full(num_requests, -1, np.int32),
            "penalty_slot": np.full(num_requests, -1, np.int32),
            "seed": np.zeros(num_requests, np.uint64),
            "cu_bias": np.zeros(num_requests + 1, np.int32),
            "bias_token_ids": np.zeros(0, np.int32),
            "bias_values": np.zeros(0, np.float32),
            "cu_mask": np.zeros(num_rows + 1, np.int32),
            "mask_token_ids": np.zeros(0, np.int32),
        }
        defaults = floats | integers
        given = {name: np.asarray(value).astype(defaults[name].dtype) for name, value in self.columns.items()}
        return SamplingArrays(**(defaults | given), token_counts=self.counts())

    def logits(self, drafts: list[list[int]]) -> np.ndarray:
        histories = [tokens + d[:j] for tokens, d in zip(self.tokens, drafts, strict=True) for j in range(len(d) + 1)]
        return np.stack([self.logits_of(history) for history in histories])

    def step(self, drafts: list[list[int]]) -> tuple[VerifyResult, tuple[int, ...]]:
        """Verify the drafts and commit the output."""
        result, failed = self.verifier.verify(self.logits(drafts), self.batch(drafts))
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
