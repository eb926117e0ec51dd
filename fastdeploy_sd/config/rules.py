"""The rules between options of different sections. Knows no origin of a value and no single option's limits."""

from __future__ import annotations

from fastdeploy_sd.config.sections import Config
from fastdeploy_sd.errors import ConfigError


def verify_rules(config: Config) -> None:
    """Check the rules between options.

    Raises:
        ConfigError: a rule is broken; the text names both options.
    """
    _verify_step_size(config)
    _verify_chunks(config)
    _verify_cache_size(config)


def _verify_step_size(config: Config) -> None:
    """Every request that may run has an equal share of a step; a token and its drafts must fit into it."""
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if num_tokens < num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens: expected at least max_num_seqs ({num_seqs}), got {num_tokens}",
            param="max_num_batched_tokens",
        )
    k = config.speculative.num_speculative_tokens
    share = num_tokens // num_seqs
    if k + 1 > share:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens: expected at most {share - 1} (max_num_batched_tokens"
            f" {num_tokens} // max_num_seqs {num_seqs} is {share}, of which one is no draft), got {k}",
            param="speculative_config",
        )


def _verify_chunks(config: Config) -> None:
    scheduler, max_model_len = config.scheduler, config.model.max_model_len
    if scheduler.enable_chunked_prefill:
        return
    if scheduler.long_prefill_token_threshold > 0:
        raise ConfigError(
            "long_prefill_token_threshold: expected 0 when enable_chunked_prefill is off, got"
            f" {scheduler.long_prefill_token_threshold}",
            param="long_prefill_token_threshold",
        )
    if max_model_len is not None and scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: expected at least max_model_len ({max_model_len}) when"
            f" enable_chunked_prefill is off, got {scheduler.max_num_batched_tokens}",
            param="max_num_batched_tokens",
        )


def _verify_cache_size(config: Config) -> None:
    cache, max_model_len = config.cache, config.model.max_model_len
    if max_model_len is None or cache.num_blocks is None:
        return
    if cache.num_blocks * cache.block_size < max_model_len:
        raise ConfigError(
            f"num_gpu_blocks_override: expected room for max_model_len ({max_model_len} tokens), got"
            f" {cache.num_blocks} blocks of {cache.block_size}",
            param="num_gpu_blocks_override",
        )
