"""This server's engine, driven step by step as the server drives it."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

import fastdeploy_sd
from benchmarks.engines import greedy_request
from benchmarks.peers.protocol import Peer, Settings, TimedCalls, TokenIds, serve
from benchmarks.step_cost import FixedDrafts, verify_rows
from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import FinishReason, RequestOutput
from fastdeploy_sd.worker.executor import create_executor

# Forward passes over up to this many rows: one token and its drafts.
_MAX_ROWS = 32
_MAX_BATCHED_TOKENS = 8192


class Ours(Peer):
    """One model in an engine whose drafts are always wrong, and none at all except in `forward`."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._drafts = FixedDrafts()
        self._max_len = 0
        self._ids = count()
        self._rows: list[str] = []

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        """Formats are bfloat16, wint8 and wint4."""
        self._max_len = settings["max_len"]
        config = config_from_kwargs(
            model=model,
            quantization=None if fmt == "bfloat16" else fmt,
            kv_cache_dtype=settings["kv_cache_dtype"],
            max_model_len=self._max_len,
            max_num_seqs=settings["max_seqs"],
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            num_threads=settings["threads"],
            speculative_config={"method": "ngram", "num_speculative_tokens": _MAX_ROWS - 1},
        )
        self._engine = Engine(config, create_executor(config, lambda *_: self._drafts))
        kv_type = "bf16" if settings["kv_cache_dtype"] == "auto" else settings["kv_cache_dtype"]
        return {"versions": {"fastdeploy_sd": fastdeploy_sd.__version__}, "kv_type": kv_type, "notes": ""}

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        self._submit(prompt, 1)
        calls = TimedCalls()
        tokens: dict[str, int] = {}
        while self._engine.has_work():
            tokens |= calls.run(self._step)
        return {"seconds": sum(calls.seconds), "tokens": list(tokens.values())}

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        self._rows = [self._submit(prompt, self._max_len - len(prompt)) for prompt in prompts]
        first: dict[str, int] = {}
        while len(first) < len(self._rows):
            first = self._step() | first
        return {"tokens": [first[request_id] for request_id in self._rows]}

    def decode(self, steps: int) -> dict[str, Any]:
        calls = TimedCalls()
        new = [calls.run(self._step) for _ in range(steps)]
        return {"seconds": calls.seconds, "tokens": [[step[row] for row in self._rows] for step in new]}

    def stop(self) -> dict[str, Any]:
        self._engine.abort(self._rows)
        self._rows = []
        self._drafts.num_drafts = 0
        return {}

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        self.stop()
        self.start([prompt])
        return {}

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        """Whole engine steps that verify rows - 1 wrong drafts, so the context grows by one each.

        Raises:
            InternalError: a step was over another number of rows.
        """
        self._drafts.num_drafts = rows - 1
        self._step()  # the one that makes the first drafts
        calls = TimedCalls()
        for _ in range(repeats):
            before = self._engine.stats()
            outputs = calls.run(self._outputs)
            verify_rows(rows, (before, self._engine.stats()), outputs)
        return {"seconds": calls.seconds}

    def _submit(self, prompt: TokenIds, max_tokens: int) -> str:
        request_id = str(next(self._ids))
        self._engine.submit(greedy_request(request_id, np.array(prompt, np.int32), max_tokens))
        return request_id

    def _step(self) -> dict[str, int]:
        """One engine step: the newest token of every request that got one."""
        return {output.request_id: output.token_ids[-1] for output in self._outputs() if output.token_ids}

    def _outputs(self) -> list[RequestOutput]:
        """One engine step, in which no request may fail."""
        outputs: list[RequestOutput] = self._engine.step()
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise InternalError(f"request: {output.error}")
        return outputs


if __name__ == "__main__":
    serve(Ours())
