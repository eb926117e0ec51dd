"""A language model without weights: the next token is a hash of everything before it. Knows no cache and no batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.types import I32, Request

_MASK = (1 << 64) - 1
EMPTY_PREFIX = 0


def extend_prefix(prefix: int, token_id: int) -> int:
    """Hash of a prefix and one more token; what the toy KV cache stores for that token's position."""
    data = prefix.to_bytes(8, "little") + token_id.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def root_prefix(adapter_digest: str) -> int:
    """Hash of no token yet, with an adapter; "" = without one."""
    return extend_prefix(EMPTY_PREFIX, int(adapter_digest[:15], 16)) if adapter_digest else EMPTY_PREFIX


def hash_prefix(token_ids: Sequence[int] | I32, adapter_digest: str = "") -> int:
    """Hash of a whole prefix."""
    prefix = root_prefix(adapter_digest)
    for token_id in token_ids:
        prefix = extend_prefix(prefix, int(token_id))
    return prefix


@dataclass(frozen=True)
class ToyModel:
    """Deterministic next-token rule, with the request's seed when it samples (temperature > 0).

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        eos_rate: probability of an EOS at any position, else EOS ids never come up.
        repeat_rate: probability of a token from a small set of ids, so that draft methods have patterns to find.
    """

    vocab_size: int
    eos_rate: float = 0.0
    repeat_rate: float = 0.0

    def next_token(self, request: Request, prefix: int, num_output_tokens: int) -> int:
        """The token after a prefix, as output number num_output_tokens + 1; min_tokens forbids EOS and stop tokens."""
        seed = request.seed if request.sampling.temperature > 0 else 0
        draw = extend_prefix((prefix + seed) & _MASK, -1)
        forbidden = set(request.eos_token_ids)
        if num_output_tokens < request.sampling.min_tokens:
            forbidden |= set(request.sampling.stop_token_ids)
        elif request.eos_token_ids and (draw >> 32) % 10_000 < self.eos_rate * 10_000:
            return request.eos_token_ids[draw % len(request.eos_token_ids)]
        size = 4 if (draw >> 16) % 10_000 < self.repeat_rate * 10_000 else self.vocab_size
        token_id = draw % size
        while token_id in forbidden:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def endless(self, request: Request) -> Iterator[int]:
        """Plain decoding, one token after the other, that never stops."""
        prefix = hash_prefix(request.prompt_token_ids, request.adapter_digest)
        num_output = 0
        while True:
            token_id = self.next_token(request, prefix, num_output)
            yield token_id
            prefix = extend_prefix(prefix, token_id)
            num_output += 1

    def generate(self, request: Request) -> list[int]:
        """What a correct engine returns for the request, whatever the schedule: plain decoding with its stop rules."""
        sampling = request.sampling
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        output: list[int] = []
        for token_id in self.endless(request):
            output.append(token_id)
            may_end = len(output) >= sampling.min_tokens
            if len(output) == request.max_tokens or (may_end and token_id in ends):
                return output
        raise AssertionError("unreachable: the model never ends")


def toy_prompt(seed: int, length: int, vocab_size: int) -> I32:
    """A prompt i32[length] that depends on the seed only."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)
