"""Engines in this process, as `LLM` drives them, and requests for them. Paddle is imported when one is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import I32, Request


@contextmanager
def running_engine(config: Config, *make_proposer: Any) -> Iterator[Engine]:
    """Load a model and yield its engine; a `make_proposer` makes what drafts in place of the configured method.

    Raises:
        ConfigError, CheckpointError: as `create_executor`.
    """
    from fastdeploy_sd.distributed.executor import create_executor

    executor = create_executor(config, *make_proposer)
    try:
        yield Engine(config, executor)
    finally:
        executor.shutdown()


def greedy_request(
    request_id: str, prompt_token_ids: I32, max_tokens: int, *, seed: int = 0, cache_salt: str = ""
) -> Request:
    """Return a greedy request that goes on after an EOS."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=seed,
        arrival_time=time.time(),
        cache_salt=cache_salt,
    )


def verify_room(engine: Engine, config: Config, batch: int, length: int) -> None:
    """Refuse a batch that cannot run as a whole: its numbers would be those of queueing and preemption.

    Args:
        length: tokens of each request, prompt and output.

    Raises:
        ConfigError: naming the option that is too small.
    """
    info, max_num_seqs = engine.model_info, config.scheduler.max_num_seqs
    if batch > max_num_seqs:
        raise ConfigError(
            f"max_num_seqs: expected at least the batch ({batch}), got {max_num_seqs}", param="max_num_seqs"
        )
    if length > info.max_model_len:
        raise ConfigError(f"max_model_len: expected at least {length} (prompt + output), got {info.max_model_len}")
    lookahead = config.speculative.num_speculative_tokens + info.speculation.num_lookahead_slots
    needed = batch * -(-(length + lookahead) // info.block_size)
    if needed > info.num_blocks:
        raise ConfigError(f"kv_cache_memory_gb: expected room for {needed} blocks, got {info.num_blocks}")


def weight_bytes(config: Config, context_len: int = 0) -> int | None:
    """Bytes of weights, and of the KV of `context_len` tokens, that a step must read; None for a mixture of experts."""
    from fastdeploy_sd.models.checkpoint import Checkpoint
    from fastdeploy_sd.models.quant_scheme import QuantScheme
    from fastdeploy_sd.models.registry import read_decoder_config
    from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
    from fastdeploy_sd.worker.kv.kv_sizing import KvCacheFormat, LayerKv, block_bytes

    decoder = read_decoder_config(Checkpoint(config.model.path).config)
    weights = weight_bytes_per_step(decoder, QuantScheme.create(config.model.dtype, config.model.quantization))
    kv_format = KvCacheFormat.create(config)
    return (
        None
        if weights is None
        else weights + context_len * block_bytes(LayerKv.of_decoder(decoder), kv_format) // kv_format.block_size
    )
