"""Small engines over the toy model and the requests to feed them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import ModelInfo, Request, RequestId, RequestOutput, Speculation, SpeculationInfo
from fastdeploy_sd.types.kv_groups import KvGroup

EOS = 1
_ARRIVAL_S = 1.0


def toy_config(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    enable_chunked_prefill: bool = True,
    enable_prefix_caching: bool = True,
    long_prefill_token_threshold: int = 0,
    policy: Literal["fair", "fcfs", "priority"] = "fcfs",
    max_step_ms: float = 0.0,
    max_num_queued_requests: int = 1000,
    max_num_queued_tokens: int = 100_000,
) -> Config:
    """A configuration of an engine over the toy model; the cache's size is the executor's to say."""
    return Config(
        model=ModelConfig(model="toy"),
        cache=CacheConfig(enable_prefix_caching=enable_prefix_caching),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=policy,
            max_step_ms=max_step_ms,
            max_num_queued_requests=max_num_queued_requests,
            max_num_queued_tokens=max_num_queued_tokens,
        ),
    )


def toy_info(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    vocab_size: int = 97,
    max_model_len: int = 4096,
    max_draft_tokens: int = 0,
    num_lookahead_slots: int = 0,
    kv_groups: tuple[KvGroup, ...] = (),
    num_state_snapshots: int | None = None,
    num_adapter_slots: int = 0,
) -> ModelInfo:
    """Limits of a toy model and its cache; with look-ahead slots its method is one that keeps KV."""
    speculation = SpeculationInfo()
    if max_draft_tokens:
        methods = ("naive", "ngram", "mtp") if num_lookahead_slots else ("naive", "ngram")
        speculation = SpeculationInfo(
            methods[-1], methods, max_draft_tokens, num_lookahead_slots, has_draft_logprobs=True
        )
    limits = vocab_size, max_model_len, (EOS,), block_size, num_blocks
    states = num_state_snapshots
    return ModelInfo(
        "toy",
        *limits,
        speculation,
        kv_groups=kv_groups,
        num_state_snapshots=states,
        num_adapter_slots=num_adapter_slots,
    )


def toy_request(
    request_id: RequestId,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    priority: int = 0,
    client: str = "",
    cache_salt: str = "",
    sampling: SamplingParams | None = None,
    speculation: Speculation | None = None,
) -> Request:
    """A validated greedy request with one EOS id."""
    return Request(
        request_id,
        np.fromiter(prompt, np.int32),
        sampling or SamplingParams(temperature=0.0),
        max_tokens,
        seed=7,
        eos_token_ids=(EOS,),
        priority=priority,
        client=client,
        cache_salt=cache_salt,
        speculation=speculation or Speculation(),
    )


class Transcript:
    """Collects an engine's outputs per request and checks that each ends once."""

    def __init__(self) -> None:
        self.token_ids: dict[RequestId, list[int]] = {}
        self.last: dict[RequestId, RequestOutput] = {}

    def add(self, outputs: Iterable[RequestOutput]) -> None:
        """Take in what `step` or `abort` returned.

        Raises:
            AssertionError: a request got an output after its end, or an empty one before it.
        """
        for output in outputs:
            assert output.request_id not in self.last, f"{output.request_id} got an output after its end"
            assert output.token_ids or output.finish_reason, f"{output.request_id} got an empty output"
            self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.last[output.request_id] = output


def run_to_end(engine: Engine, transcript: Transcript | None = None, max_steps: int = 10_000) -> Transcript:
    """Step until nothing is left, checking every invariant after each step.

    Raises:
        AssertionError: an invariant broke, or the engine is still busy after max_steps.
    """
    transcript = transcript or Transcript()
    for _ in range(max_steps):
        if not engine.has_work():
            return transcript
        transcript.add(engine.step())
        engine.wait_for_arrival(_ARRIVAL_S)  # or steps that run nothing would be counted while a grammar is compiled
        engine.check_integrity()
    raise AssertionError(f"still busy after {max_steps} steps")


def most_blocks(engine: Engine, prompt_len: int, max_tokens: int, first_token: int = 3) -> int:
    """Run a request, and return the most KV blocks that were in use after a step."""
    prompt = first_token + np.arange(prompt_len, dtype=np.int32)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    engine.submit(Request("long", prompt, sampling, max_tokens=max_tokens, seed=0))
    most, kv = 0, engine._scheduler.pool.kv
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        most = max(most, kv.num_blocks - kv.num_free_blocks - kv.num_cached_blocks)
    return most
