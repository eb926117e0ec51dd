"""Opens the compiler of requests' grammars, for a loaded model."""

from __future__ import annotations

import logging

from fastdeploy_sd.config import Config
from fastdeploy_sd.text.guidance.compiler import GrammarStore
from fastdeploy_sd.text.guidance.vocabulary import VocabularyError, load_vocabulary

_log = logging.getLogger(__name__)


def open_grammars(config: Config, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarStore | None:
    """Return the store of a model's grammars; None, with a line in the log, where its vocabulary allows none."""
    model = config.model
    try:
        vocabulary = load_vocabulary(model.tokenizer_path, model.tokenizer_backend, vocab_size, eos_token_ids)
    except VocabularyError as error:
        _log.warning("%s; requests for it are refused", error.message)
        return None
    return GrammarStore(vocabulary, max_used=2 * config.scheduler.max_num_seqs)
