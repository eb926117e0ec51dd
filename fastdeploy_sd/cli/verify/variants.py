"""The rows of the matrix: batch sizes, prompt chunks, prefix cache, preemption, block size, threads, eager."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdeploy_sd.cli.verify.requests import USUAL_LENGTHS, Lengths
from fastdeploy_sd.errors import ConfigError

_ALL_AT_ONCE = 1 << 20
_LARGEST_BATCH = 64
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """One way of running requests.

    Attributes:
        max_num_batched_tokens: tokens in one step; raised to what max_num_seqs requests and their drafts need.
        long_prefill_token_threshold: prompt tokens of a request in one step, 0 = as many as fit.
        enforce_eager: run the model's ops one by one, True = also where the configuration does not.
        num_requests: how many of the matrix's requests run, from the first on; None = all.
        num_passes: times the requests are submitted; from the second on a prefix cache knows their prompts, and
            methods that learn from outputs know these.
        must_preempt, must_hit: preemption / prefix hits must have happened, or the way has shown nothing.
    """

    name: str
    max_num_seqs: int = _LARGEST_BATCH
    max_num_batched_tokens: int = 4096
    long_prefill_token_threshold: int = 0
    num_blocks: int = 1024
    block_size: int = _BLOCK_SIZE
    enable_prefix_caching: bool = False
    num_threads: int | None = None
    enforce_eager: bool = False
    arrivals_per_step: int = _ALL_AT_ONCE
    num_requests: int | None = None
    num_passes: int = 1
    must_preempt: bool = False
    must_hit: bool = False


# What every other way must reproduce, with plain decoding: one request in the engine, its prompt in one piece.
ALONE = EngineVariant("alone", max_num_seqs=1)


def all_variants(lengths: Lengths = USUAL_LENGTHS) -> list[EngineVariant]:
    """The product of batch 1, 7, 64, chunks of 16, 64 and whole prompts, prefix cache on and off, blocks for all and
    for few; then block size, threads and eager execution by themselves. A batch of one has no request to preempt.

    Raises ConfigError: requests of these lengths do not get in each other's way.
    """
    ways = [
        way
        for batch in (1, 7, _LARGEST_BATCH)
        for chunk in (16, 64, 0)
        for has_prefix in (False, True)
        for must_preempt in ((False,) if batch == 1 else (False, True))
        for way in [_variant(batch, chunk, has_prefix, must_preempt, lengths)]
    ]
    return [*ways, *_OTHERS]


def quick_variants(lengths: Lengths = USUAL_LENGTHS) -> list[EngineVariant]:
    """A few ways in which every value of the product occurs; raises as all_variants."""
    return [
        _variant(1, 64, True, False, lengths),
        _variant(7, 16, True, True, lengths),
        _variant(_LARGEST_BATCH, 0, False, False, lengths),
        _variant(_LARGEST_BATCH, 16, False, True, lengths),
        _variant(_LARGEST_BATCH, 64, True, False, lengths),
    ]


def _variant(batch: int, chunk: int, has_prefix: bool, must_preempt: bool, lengths: Lengths) -> EngineVariant:
    parts = [f"batch {batch}", f"chunks of {chunk}" if chunk else "whole prompts"]
    parts += ["prefix cache"] * has_prefix + ["preemption"] * must_preempt
    way = EngineVariant(
        ", ".join(parts),
        max_num_seqs=batch,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=has_prefix,
        # Small batches take turns arriving, so that requests at their start and at their end share steps.
        arrivals_per_step=_ALL_AT_ONCE if batch == _LARGEST_BATCH else 1,
        num_requests={1: 12, 7: 24}.get(batch),
        num_passes=2 if has_prefix else 1,
        must_hit=has_prefix,
    )
    if must_preempt:
        # All at once: admission then fills the cache, and a request that grows takes blocks from another.
        num_blocks = blocks_for_preemption(_BLOCK_SIZE, lengths)
        way = replace(way, num_blocks=num_blocks, arrivals_per_step=_ALL_AT_ONCE, must_preempt=True)
    return way


def blocks_for_preemption(block_size: int, lengths: Lengths) -> int:
    """Return so few blocks that a request must be preempted, and enough for one request of any length.

    The long requests come first and are admitted together, with blocks for their prompts. Whichever ends first then has
    blocks for all its tokens but the last, in addition to those for the prompt of the other: there is one block less.
    Raises ConfigError: there is no such number for requests of these lengths.
    """
    at_its_end, prompt = -(-(lengths.long - 1) // block_size), -(-lengths.long_prompt // block_size)
    num_blocks = at_its_end + prompt - 1
    needed = max(2 * prompt, -(-lengths.whole // block_size))
    if num_blocks < needed:
        raise ConfigError(
            f"prompt_tokens, output_tokens: expected lengths with which some number of blocks of {block_size} tokens is"
            " too few for two requests and enough for each, as longer or slightly other ones are, got"
            f" {lengths.prompt} and {max(lengths.output)}"
        )
    return num_blocks


_OTHERS = (
    EngineVariant("blocks of 64", block_size=64, num_blocks=256),
    EngineVariant("blocks of 128, prefix cache", 7, block_size=128, enable_prefix_caching=True, num_passes=2),
    EngineVariant("one thread", num_threads=1),
    EngineVariant("three threads", num_threads=3),
    EngineVariant("eager", enforce_eager=True),
)
