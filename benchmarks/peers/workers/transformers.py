"""Hugging Face transformers on PyTorch: the familiar baseline, in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.protocol import Peer, Settings, TimedCalls, TokenIds, serve


class Transformers(Peer):
    """A loop of forward calls with a dynamic cache; `generate` where it drafts."""

    def __init__(self) -> None:
        self._model: Any = None
        self._cache: Any = None
        self._last: Any = None

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        del fmt
        torch.set_num_threads(settings["threads"])
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"versions": versions, "kv_type": "bf16", "notes": self._model.config._attn_implementation}

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        calls = TimedCalls()
        calls.run(lambda: self.start([prompt]))
        return {"seconds": calls.seconds[0], "tokens": self._last[:, 0].tolist()}

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        self._cache = DynamicCache(config=self._model.config)
        self._last = self._run(torch.tensor(prompts), num_logits=1).argmax(-1)
        return {"tokens": self._last[:, 0].tolist()}

    def decode(self, steps: int) -> dict[str, Any]:
        calls = TimedCalls()
        tokens = [calls.run(self._step) for _ in range(steps)]
        return {"seconds": calls.seconds, "tokens": tokens}

    def stop(self) -> dict[str, Any]:
        self._cache = None
        return {}

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        self.start([prompt])
        return {}

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        """The rows leave the cache again."""
        calls = TimedCalls()
        ids = self._last.expand(1, rows)
        for _ in range(repeats):
            calls.run(lambda: self._run(ids, num_logits=rows))
            self._cache.crop(-rows)
        return {"seconds": calls.seconds}

    def generate(self, prompt: TokenIds, max_tokens: int, option: dict[str, Any]) -> dict[str, Any]:
        """Options are `generate`'s, e.g. {"prompt_lookup_num_tokens": 8}."""
        calls, ids = TimedCalls(), torch.tensor([prompt])
        common = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = calls.run(lambda: self._model.generate(ids, **common, **option))
        return {"tokens": tokens[0, len(prompt) :].tolist(), "seconds": calls.seconds[0]}

    def _step(self) -> list[int]:
        self._last = self._run(self._last, num_logits=1).argmax(-1)
        ids: list[int] = self._last[:, 0].tolist()
        return ids

    def _run(self, ids: Any, num_logits: int) -> Any:
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=num_logits)
        return out.logits


if __name__ == "__main__":
    serve(Transformers())
