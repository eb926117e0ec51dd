"""Whether a draft model has its target's vocabulary. Needs no Paddle."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_sd.config import Config
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.models.draft_model import DraftWeights
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer

_FILE = "tokenizer.json"
_PARAM = "speculative_config"


def verify_vocabulary(config: Config, vocab_size: int, draft: DraftWeights) -> None:
    """Verify that a draft model and its target, with this `vocab_size`, have the same tokens, as far as both have some.

    One of them may have more ids, as checkpoints pad their vocabulary. Raises ConfigError: a token differs, or the
    sizes differ and one of the models has no tokenizer.
    """
    own, other = config.model.tokenizer_path, draft.checkpoint.path
    if _have_same_file(own, other):
        return
    try:
        tokenizers = load_tokenizer(own, config.model.tokenizer_backend), load_tokenizer(other)
    except FdsdError as error:
        if vocab_size == draft.config.vocab_size:
            return
        raise ConfigError(
            f"{_PARAM}.model: expected a draft model with the target's {vocab_size} token ids, as tokens cannot be"
            f" compared ({error.message}), got {draft.config.vocab_size}",
            param=_PARAM,
        ) from None
    for token_id in range(min(tokenizer.num_ids for tokenizer in tokenizers)):
        wanted, got = (_token(tokenizer, token_id) for tokenizer in tokenizers)
        if wanted != got:
            raise ConfigError(
                f"{_PARAM}.model: expected a draft model with the target's vocabulary, in which token {token_id} is"
                f" {wanted!r}, got {got!r} in {other}",
                param=_PARAM,
            )


def _have_same_file(first: Path, second: Path) -> bool:
    try:
        return (first / _FILE).read_bytes() == (second / _FILE).read_bytes()
    except OSError:
        return False


def _token(tokenizer: Tokenizer, token_id: int) -> bytes | str:
    spelled = tokenizer.token_bytes(token_id)
    return tokenizer.decode([token_id], skip_hidden=False) if spelled is None else spelled
