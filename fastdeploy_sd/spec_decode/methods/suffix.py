"""Drafts from texts seen before: the request's own, and outputs of other requests with its salt and adapter."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_sd.spec_decode.methods.native_texts import TextProposer
from fastdeploy_sd.spec_decode.methods.suffix_drafter import (
    SALT_DIGEST_BYTES,
    SuffixDrafter,
    SuffixLimits,
    SuffixRule,
    SuffixStats,
)
from fastdeploy_sd.spec_decode.methods.suffix_file import load_sequences, save_sequences, verify_can_save
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposerContext

if TYPE_CHECKING:
    from fastdeploy_sd.config import SpeculativeConfig

logger = logging.getLogger(__name__)


class SuffixProposer(TextProposer):
    """Guesses the most frequent continuation of the longest context seen before; see SuffixDrafter.

    A request's prompt and output are searched only for that request. Its output is also shared with requests of its
    salt and adapter, token by token, and stays after its end within `suffix_decoding_max_cached_requests` and
    `suffix_decoding_max_cache_mb`. Outputs that were extended longest ago go first. An output is stored after the end
    of its prompt, as far as a match can use it. So the answer to a repeated question is known from its first token on.

    Raises (on construction):
        ConfigError: the cache file belongs to another vocabulary, its folder cannot be written, or nothing is cached.
    """

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        rule = SuffixRule(
            max_context=config.suffix_decoding_max_tree_depth,
            max_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
            follows_copies=config.follow_copies,
        )
        limits = SuffixLimits(config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_cache_mb << 20)
        self._vocab_size = context.vocab_size
        self._texts = self._drafter = SuffixDrafter(
            context.max_num_seqs, context.vocab_size, rule, limits, makes_trees=config.draft_trees
        )
        self._file = None if config.suffix_decoding_cache_file is None else Path(config.suffix_decoding_cache_file)
        self._is_closed = False
        if self._file is None:
            return
        verify_can_save(self._file, is_cache_enabled=limits.max_outputs != 0 and limits.max_bytes != 0)
        if self._file.exists():
            self._drafter.import_sequences(load_sequences(self._file, context.vocab_size))

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start a text per request; its tokens are read in its first step."""
        for request in requests:
            # Output number min_tokens, from 1, is the first that may end it.
            first_end = request.num_prompt_tokens + max(request.min_tokens, 1) - 1
            # Tokens after the prompt were shared before the preemption.
            salt = _salt_digest(request.cache_salt, request.adapter_digest)
            self._drafter.begin(request.table_row, request.num_tokens, salt, request.end_token_ids, first_end)

    def close(self) -> None:
        """Save the shared outputs if a file is configured; that it cannot be written is logged, not raised."""
        if self._file is None or self._is_closed:
            return
        self._is_closed = True
        try:
            save_sequences(self._file, self._drafter.export_sequences(), self._vocab_size)
        except OSError as error:
            logger.error("suffix_decoding_cache_file: expected to write %s: %s", self._file, error)

    def stats(self) -> SuffixStats:
        return self._drafter.stats()


def _salt_digest(salt: str, adapter_digest: str) -> bytes:
    # As a key, so that no salt of a user stands for another adapter.
    key = bytes.fromhex(adapter_digest)
    return hashlib.blake2b(salt.encode(), digest_size=SALT_DIGEST_BYTES, key=key).digest()
