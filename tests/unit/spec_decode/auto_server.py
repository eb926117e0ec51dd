"""A server's router over the method `auto`, driven as a worker does, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import MethodDispatcher
from fastdeploy_sd.spec_decode.proposer import DraftRequest, PerRequestMethod, ProposeInput, ProposerContext
from fastdeploy_sd.types import DraftTokens

NUM_SEQS, MAX_LEN, VOCAB, K = 4, 512, 1000, 6
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


class Server:
    """A router over `auto`, driven as a worker does: one row per request, each of which says its text to the end."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        num_prompt: int = 24,
        methods: Sequence[str] = (),
        per_request_methods: tuple[PerRequestMethod, ...] = (),
    ) -> None:
        self.texts = texts
        self.context = ProposerContext(NUM_SEQS, MAX_LEN, VOCAB, per_request_methods=per_request_methods)
        self.router = MethodDispatcher(SpeculativeConfig(method="auto", num_speculative_tokens=K), self.context)
        self.step_stats = self.context.step_stats
        self.table = np.zeros((NUM_SEQS, MAX_LEN), np.int32)
        self.num_tokens = [num_prompt] * len(texts)
        self.drafts = [0] * len(texts)
        self.asked = 0
        self.kept: ProposeInput | None = None  # the same value is given in every step, as workers do; None = new ones
        self.methods = names = methods or [""] * len(texts)
        for row, text in enumerate(texts):
            self.table[row, :num_prompt] = text[:num_prompt]
        self.router.begin([DraftRequest(f"r{i}", i, num_prompt, num_prompt, method=m) for i, m in enumerate(names)])

    def step(self, num_steps: int = 1, limit: int = K, row_s: float = 1e-4, host_s: float = 0.0) -> None:
        """Run steps that take 1 ms and `row_s` more for each draft, `host_s` apart; right drafts are accepted."""
        for _ in range(num_steps):
            num_drafts = sum(self.drafts)
            self.step_stats.num_tokens, self.step_stats.num_requests = len(self.texts) + num_drafts, len(self.texts)
            self.step_stats.seconds, self.step_stats.host_seconds = 1e-3 + row_s * num_drafts, host_s
            if self.step_stats.skip_draft_steps > 0:
                self.step_stats.skip_draft_steps -= 1
                self.step_stats.num_skipped_steps += 1
                drafts = DraftTokens.none(len(self.texts))
            else:
                drafts = self.router.propose(self._input(limit))
                self.asked += 1
            for row, text in enumerate(self.texts):
                guess, n = drafts.row(row).tolist(), self.num_tokens[row]
                rest = list(text[n : n + len(guess) + 1])
                num_right = next((i for i, token_id in enumerate(guess) if token_id != rest[i]), len(guess))
                self.table[row, n : n + num_right + 1] = rest[: num_right + 1]
                self.num_tokens[row] += num_right + 1
            self.drafts = np.diff(drafts.cu_num_draft).tolist()

    def _input(self, limit: int) -> ProposeInput:
        rows = np.arange(len(self.texts), dtype=np.int32)
        num_tokens = np.array(self.num_tokens, np.int32)
        limits = np.array([0 if method == "naive" else limit for method in self.methods], np.int32)
        if self.kept is not None:
            self.kept.num_tokens[:], self.kept.max_draft_len[:] = num_tokens, limits
            return self.kept
        return ProposeInput(tuple(f"r{r}" for r in rows), rows, self.table, num_tokens, limits)


def repeated(count: int = MAX_LEN) -> list[int]:
    return (PHRASE * count)[:count]


def random_text(count: int = MAX_LEN, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).permutation(VOCAB)[:count].tolist()
