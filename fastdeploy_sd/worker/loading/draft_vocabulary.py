"""Makes a draft model and its target agree on token ids. Needs no Paddle."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.models.drafters.draft_decoder_weights import DraftDecoderWeights, TokenTranslation
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)
_FILE = "tokenizer.json"
_PARAM = "speculative_config"


def fit_vocabulary(config: Config, vocab_size: int, draft: DraftDecoderWeights) -> None:
    """Verify that a draft model has the tokens of its target, with this `vocab_size`, or translate them if asked to.

    One of them may have more ids, as checkpoints pad their vocabulary. Raises ConfigError: a token differs, or none is
    the same, or tokens cannot be compared and the sizes differ.
    """
    own, other = config.model.tokenizer_path, draft.checkpoint.path
    if _have_same_file(own, other):
        return
    try:
        tokenizers = load_tokenizer(own, config.model.tokenizer_backend), load_tokenizer(other)
    except FdsdError as error:
        if vocab_size == draft.config.vocab_size and not config.speculative.translate_tokens:
            return
        raise ConfigError(
            f"{_PARAM}.model: expected a draft model with the target's {vocab_size} token ids, as tokens cannot be"
            f" compared ({error.message}), got {draft.config.vocab_size}",
            param=_PARAM,
        ) from None
    targets, drafts = _tokens(tokenizers[0], vocab_size), _tokens(tokenizers[1], draft.config.vocab_size)
    different = next((i for i, (wanted, got) in enumerate(zip(targets, drafts, strict=False)) if wanted != got), None)
    if different is None:
        return
    if not config.speculative.translate_tokens:
        raise ConfigError(
            f"{_PARAM}.model: expected a draft model with the target's vocabulary, in which token {different} is"
            f" {targets[different]!r}, got {drafts[different]!r} in {other}; translate_tokens drafts what both have",
            param=_PARAM,
        )
    translation = translated(targets + [b""] * (vocab_size - len(targets)), drafts)
    if len(translation.drafted) == 0:
        raise ConfigError(f"{_PARAM}.model: expected tokens that the target has too, got none in {other}", param=_PARAM)
    _log.info("draft model: %d of the target's %d tokens can be drafted", len(translation.drafted), len(targets))
    draft.translate(translation)


def translated(targets: list[bytes | str], drafts: list[bytes | str]) -> TokenTranslation:
    """Return the translation between two vocabularies, each as what its tokens are.

    A target's token that the draft model has not is read as the longest that it ends with, or else as token 0.
    """
    ids = {token: token_id for token_id, token in reversed(list(enumerate(drafts))) if token}
    same = [ids.get(token) for token in targets]
    own = [_longest_end(token, ids) if found is None else found for token, found in zip(targets, same, strict=True)]
    drafted = [token_id for token_id, found in enumerate(same) if found is not None]
    return TokenTranslation(np.array(own, np.int32), np.array(drafted, np.int32))


def _longest_end(token: bytes | str, ids: dict[bytes | str, int]) -> int:
    return next((ids[token[i:]] for i in range(1, len(token)) if token[i:] in ids), 0)


def _have_same_file(first: Path, second: Path) -> bool:
    try:
        return (first / _FILE).read_bytes() == (second / _FILE).read_bytes()
    except OSError:
        return False


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[bytes | str]:
    """Return what each token is that both the tokenizer and the model have."""
    spelled = [tokenizer.token_bytes(token_id) for token_id in range(min(tokenizer.num_ids, vocab_size))]
    return [tokenizer.decode([i], skip_hidden=False) if token is None else token for i, token in enumerate(spelled)]
