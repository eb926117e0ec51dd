"""The Tokenizer interface, and which implementation reads a checkpoint.

A *control token* steers the model (turn borders, end of text). Written in a raw prompt it acts; in a conversation
(`encode_segments`) only those do that the chat template wrote itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.added_tokens import Segment, cut, token_pattern
from fastdeploy_sd.text.tokenizer_files import TokenizerFiles


class Tokenizer(Protocol):
    """Text <-> token ids of one checkpoint. Safe to use from several threads."""

    @property
    def files(self) -> TokenizerFiles:
        """Special tokens by role, end-of-text ids, chat template."""
        ...

    @property
    def num_ids(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of each control token: those flagged special, and marks such as <think>."""
        ...

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Ids left out of generated text: those flagged special."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the checkpoint's list, or the tokenizer's end-of-text token."""
        ...

    @property
    def max_token_chars(self) -> int | None:
        """No token stands for more characters of a text than this; None where no bound is known."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, control tokens parsed; `add_special_tokens` adds e.g. a leading BOS."""
        ...

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of a prompt in which exactly the segments marked so are control tokens; raises BadRequest."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_hidden: bool) -> str:
        """Return the text of a whole sequence; ids unknown to the tokenizer have no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes a token adds in the middle of a text, None where that depends on its neighbours."""
        ...


def output_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return a function that gives the ids with which a model writes a text; it raises what `encode_segments` does.

    Control tokens that generated text shows, such as <tool_call>, act in it; others are text.
    """
    shown = token_pattern(text for text, i in tokenizer.control_tokens.items() if i not in tokenizer.hidden_ids)
    return lambda text: tokenizer.encode_segments([Segment(*part) for part in cut(shown, text)])


def load_tokenizer(directory: Path, backend: str = "auto", chat_template: str | None = None) -> Tokenizer:
    """Load a checkpoint's tokenizer with a backend, "auto" for the first file that it has.

    `chat_template`: a file or a text in place of the checkpoint's, None = that one.

    Raises CheckpointError of a missing or malformed file, ConfigError of an unknown backend or no such template.
    """
    if backend not in ("auto", "tokenizers", "sentencepiece"):
        raise ConfigError(
            f"tokenizer_backend: expected auto, tokenizers or sentencepiece, got {backend!r}", param="tokenizer_backend"
        )
    if backend == "sentencepiece" or (backend == "auto" and not os.path.lexists(directory / "tokenizer.json")):
        # Imported only where it is needed, as few checkpoints have such a model.
        from fastdeploy_sd.text.sentencepiece_tokenizer import SentencePieceTokenizer, model_path

        if backend == "sentencepiece" or model_path(directory) is not None:
            return SentencePieceTokenizer(directory, chat_template)
    from fastdeploy_sd.text.fast_tokenizer import FastTokenizer

    return FastTokenizer(directory, chat_template)
