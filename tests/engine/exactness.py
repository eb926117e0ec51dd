"""Requests with every sampling feature, and engines over real checkpoints to run them in different ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.proposer import Proposer
from fastdeploy_sd.types import FinishReason, Request, TokenLogprob
from fastdeploy_sd.worker.executor import create_executor
from tests.doubles.engines import Transcript
from tests.models import golden

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy-logprobs": {"temperature": 0.0, "logprobs": 3},
    "plain": {"temperature": 1.0},
    "hot-top-k": {"temperature": 1.7, "top_k": 20, "logprobs": 0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "everything": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "logprobs": 5},
    "penalties": {
        "temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 2,
    },
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 1.0},
    "bias": {"temperature": 0.6, "logit_bias": {5: 4.0, 17: 5.0, 99: -100.0}},
    "min-tokens": {"temperature": 0.9, "logit_bias": {2: 6.0}, "min_tokens": 6, "stop_token_ids": (7,)},
    "ends-early": {"temperature": 1.0, "logit_bias": {2: 7.0}},
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One way of running requests."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    num_blocks: int = 256
    block_size: int = 16
    enable_prefix_caching: bool = False
    num_drafts: int = 0
    num_threads: int | None = None
    model: dict[str, Any] = field(default_factory=lambda: {"dtype": "bfloat16"})


def requests(seed: int, count: int, vocab_size: int = 4096) -> list[Request]:
    """Return `count` requests over all samplings, with prompts that partly share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(4, vocab_size) for _ in range(70)]
    names = list(SAMPLINGS)
    made = []
    for i in range(count):
        own = [rng.randrange(4, vocab_size) for _ in range(rng.choice([1, 2, 9, 17, 40, 90]))]
        prompt = shared[: rng.choice([0, 16, 33, 70])] + own
        sampling = SamplingParams(**SAMPLINGS[names[i % len(names)]])
        bad_words = ((own[0],), (own[-1], 11)) if i % 5 == 0 else ()
        made.append(
            Request(
                f"r{i}",
                np.array(prompt, np.int32),
                sampling,
                max_tokens=rng.choice([1, 5, 18, 24]),
                seed=1000 + i,
                eos_token_ids=(2,),
                bad_words_token_ids=bad_words,
            )
        )
    return made


def make_engine(name: str, setup: Setup, proposer: Proposer | None = None) -> Engine:
    """Build an engine over a golden checkpoint."""
    config = Config(
        model=ModelConfig(model=str(golden.ROOT / name), max_model_len=512, **setup.model),
        cache=CacheConfig(
            block_size=setup.block_size,  # type: ignore[arg-type]
            num_blocks=setup.num_blocks,
            enable_prefix_caching=setup.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(max_num_seqs=setup.max_num_seqs, max_num_batched_tokens=setup.max_num_batched_tokens),
        speculative=SpeculativeConfig(num_speculative_tokens=setup.num_drafts),
        num_threads=setup.num_threads,
    )
    return Engine(config, create_executor(config, proposer))


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


class _Collector(Transcript):
    def __init__(self) -> None:
        super().__init__()
        self.logprobs: dict[str, list[TokenLogprob]] = {}

    def add(self, outputs: Any) -> None:
        outputs = list(outputs)
        super().add(outputs)
        for output in outputs:
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())


def run(engine: Engine, todo: Sequence[Request], arrivals_per_step: int = 1000) -> dict[str, Answer]:
    """Submit a few requests before each step and run all to their end, checking invariants after each step."""
    collector, pending = _Collector(), list(todo)
    for _ in range(100_000):
        for request in pending[:arrivals_per_step]:
            engine.submit(request)
        del pending[:arrivals_per_step]
        if not engine.has_work():
            break
        collector.add(engine.step())
        engine.check_integrity()
    return {
        r.request_id: Answer(
            tuple(collector.token_ids[r.request_id]),
            tuple(collector.logprobs.get(r.request_id, ())),
            collector.last[r.request_id].finish_reason,
        )
        for r in todo
    }


def run_alone(name: str, setup: Setup, todo: Sequence[Request]) -> dict[str, Answer]:
    """Run each request by itself, prompt in one piece: what every other way must reproduce."""
    engine = make_engine(name, setup)
    answers: dict[str, Answer] = {}
    for request in todo:
        answers |= run(engine, [request])
    return answers


def continuations(name: str, setup: Setup, todo: Sequence[Request], extra: int = 8) -> dict[str, list[int]]:
    """Prompt and output of every request, `extra` tokens past its limit: what an oracle knows."""
    longer = [replace(r, max_tokens=r.max_tokens + extra) for r in todo]
    answers = run_alone(name, setup, longer)
    return {r.request_id: [*r.prompt_token_ids.tolist(), *answers[r.request_id].token_ids] for r in todo}
