"""Engines that draft by MTP, and a record of what the layers drafted after which text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import I32, DraftTokens, Request, RequestId
from fastdeploy_sd.worker.executor import create_executor
from tests.doubles.engines import Transcript

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Event:
    """What was drafted after a text, and how many drafts could have been.

    Attributes:
        num_kv_slots: KV slots that the request had from its newest token on; 0 if its method has no use for them.
    """

    request_id: RequestId
    text: I32
    drafts: I32
    max_draft_len: int
    num_kv_slots: int


@dataclass
class Recorder:
    """Notes what a proposer drafts, and hands the engine that or, where `replace` says so, something else.

    Attributes:
        continuations: request id -> prompt and everything the model says after it; what a right draft is.
        habit: how many right drafts to hand out before a wrong one, per call in turn; empty = the proposer's own.
    """

    proposer: Proposer
    continuations: dict[RequestId, list[int]] = field(default_factory=dict)
    habit: Sequence[int] = ()
    events: list[Event] = field(default_factory=list)
    num_begun: int = 0

    @property
    def num_lookahead_slots(self) -> int:
        return self.proposer.num_lookahead_slots

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.num_begun += len(requests)
        self.proposer.begin(requests)

    def forget(self, table_rows: I32) -> None:
        self.proposer.forget(table_rows)

    def close(self) -> None:
        self.proposer.close()

    def propose(self, x: ProposeInput) -> DraftTokens:
        drafts = self.proposer.propose(x)
        for r, request_id in enumerate(x.request_ids):
            if x.max_draft_len[r] > 0:
                num_kv_slots = 0 if x.target is None else int(x.target.num_kv_slots[r] - x.num_tokens[r] + 1)
                text = x.token_table[x.table_rows[r], : x.num_tokens[r]].copy()
                self.events.append(Event(request_id, text, drafts.row(r).copy(), int(x.max_draft_len[r]), num_kv_slots))
        return self._replaced(x) if self.habit else drafts

    def _replaced(self, x: ProposeInput) -> DraftTokens:
        rows = []
        for r, request_id in enumerate(x.request_ids):
            n = int(x.num_tokens[r])
            right = self.continuations[request_id][n : n + int(x.max_draft_len[r])]
            num_right = self.habit[(n + r) % len(self.habit)]
            rows.append(right[:num_right] + [(token + 1) % 4096 for token in right[num_right:]])
        return DraftTokens(
            np.array([token for row in rows for token in row], np.int32),
            np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32),
        )


def make_engine(
    model: str, num_steps: int, /, *, is_looking_ahead: bool = True, **options: Any
) -> tuple[Engine, Recorder]:
    """An engine that drafts `num_steps` tokens with the model's MTP layers.

    In float32, with unquantised layers and the model's own head unless options say otherwise, so that drafts are known
    exactly.

    Args:
        is_looking_ahead: whether the engine reserves KV slots for drafting.
        options: of CacheConfig, SchedulerConfig, ModelConfig and SpeculativeConfig, by field name.
    """
    cache = {"block_size": BLOCK_SIZE, "num_blocks": 128, "enable_prefix_caching": False}
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    arithmetic = {"dtype": "float32", "max_model_len": 512}
    if "enforce_eager" in options:
        arithmetic["enforce_eager"] = options.pop("enforce_eager")
    if "target_quantization" in options:
        arithmetic["quantization"] = options.pop("target_quantization")
    drafting = {"method": "mtp", "num_speculative_tokens": num_steps, "num_model_steps": max(num_steps, 1)}
    drafting["draft_head_quantization"] = "target"
    quantization = {"quantization": options.pop("quantization", "none")}
    for part in (cache, limits, arithmetic, drafting):
        part |= {name: options.pop(name) for name in list(options) if name in part}
    limits |= {name: options.pop(name) for name in list(options) if name == "long_prefill_token_threshold"}
    config = Config(
        model=ModelConfig(model=model, **arithmetic),  # type: ignore[arg-type]
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**limits),
        speculative=SpeculativeConfig(**drafting, **quantization, **options),  # type: ignore[arg-type]
    )
    executor = create_executor(config)
    runner = executor._runner
    assert runner is not None
    recorder = Recorder(runner._drafting._guard)
    runner._drafting._guard = recorder  # type: ignore[assignment]
    if not is_looking_ahead:
        info = executor.model_info
        executor.model_info = replace(info, speculation=replace(info.speculation, num_lookahead_slots=0))
    return Engine(config, executor), recorder


def make_requests(prompts: Sequence[I32], max_tokens: int, **sampling: Any) -> list[Request]:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return [Request(f"r{i}", prompt, params, max_tokens, seed=i) for i, prompt in enumerate(prompts)]


def run(engine: Engine, requests: Sequence[Request]) -> dict[RequestId, list[int]]:
    """Run requests to their end and return each one's prompt and output."""
    transcript = Transcript()
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        transcript.add(engine.step())
        engine.check_integrity()
    return {r.request_id: [*r.prompt_token_ids.tolist(), *transcript.token_ids[r.request_id]] for r in requests}
