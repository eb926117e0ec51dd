"""Text -> token ids for a replay: a checkpoint's tokenizer, or a crude one that needs no files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer, output_encoder

WORDS = "words"
# A word is cut at six letters; a space belongs to the word after it; everything else, digits too, is one token each.
_WORD_PIECE = re.compile(r" ?[^\W\d_]{1,6}|.", re.DOTALL)


class TextEncoder(Protocol):
    """Turns text into token ids."""

    @property
    def end_token_id(self) -> int:
        """Ends every message, as a model would end its answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; tokens that generated text hides are plain text in it.

        Raises BadRequest: the text cannot be written without a control token.
        """
        ...


class WordEncoder:
    """Words cut at six letters, numbered as they come: figures that do not depend on a vocabulary."""

    end_token_id = 0

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a piece never seen before gets the next number."""
        ids = self._ids
        return [ids.setdefault(piece, len(ids) + 1) for piece in _WORD_PIECE.findall(text)]


class ModelEncoder:
    """A checkpoint's tokenizer; a model without an end-of-text token ends messages with id 0."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = output_encoder(tokenizer)
        self.end_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0

    def encode(self, text: str) -> list[int]:
        return self._encode(text)


def load_encoder(name: str) -> TextEncoder:
    """Return the encoder for "words", "demo" or a directory with tokenizer.json.

    Raises CheckpointError: the directory has no readable tokenizer.
    """
    if name == WORDS:
        return WordEncoder()
    path = ModelConfig(DEMO_MODEL).path if name == DEMO_MODEL else Path(name)
    return ModelEncoder(load_tokenizer(path))
