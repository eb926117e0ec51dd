"""The Tokenizer interface on PaddleNLP, for checkpoints without a tokenizer.json. Imported only when chosen."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.text.added_tokens import Segment, encode_spelled_out, token_pattern
from fastdeploy_sd.text.tokenizer_files import read_tokenizer_files


class PaddleNLPTokenizer:
    """A tokenizer of `paddlenlp.transformers.AutoTokenizer`; see Tokenizer for the meaning of each method.

    Raises:
        ConfigError: PaddleNLP is not installed.
        CheckpointError: PaddleNLP cannot read the directory.
    """

    def __init__(self, directory: Path) -> None:
        try:
            transformers = importlib.import_module("paddlenlp.transformers")
        except ImportError as error:
            raise ConfigError(
                "tokenizer_backend: expected PaddleNLP to be installed for paddlenlp (pip install"
                f" 'fastdeploy-sd[paddlenlp]'), got {error}",
                param="tokenizer_backend",
            ) from None
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(directory))
        except Exception as error:  # PaddleNLP raises whatever its readers do
            raise CheckpointError(f"{directory}: expected a tokenizer PaddleNLP can read, got {error}") from None
        self.files = read_tokenizer_files(directory)
        special: list[str] = list(self._tokenizer.all_special_tokens)
        marks = {t.content: t.token_id for t in self.files.added_tokens if t.is_control and t.token_id is not None}
        ids = {text: int(self._tokenizer.convert_tokens_to_ids(text)) for text in (*special, *marks)}
        self.hidden_ids = frozenset(ids[text] for text in special)
        self.control_tokens = {text: i for text, i in ids.items() if i in self.hidden_ids or marks.get(text) == i}
        self._control_ids = frozenset(self.control_tokens.values())
        self._any_control = token_pattern(self.control_tokens)
        self.max_token_chars: int | None = None  # nothing is known about its normalization

    @property
    def num_ids(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        own = self._tokenizer.eos_token_id
        return self.files.eos_token_ids or (() if own is None else (int(own),))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        token_ids: list[int] = []
        for segment in segments:
            if segment.is_control:
                token_ids.append(self.control_tokens[segment.text])
            else:
                token_ids += encode_spelled_out(segment.text, self._any_control, self._encode_plain)
        return token_ids

    def _encode_plain(self, text: str) -> list[int] | None:
        token_ids = self.encode(text, add_special_tokens=False) if text else []
        return token_ids if self._control_ids.isdisjoint(token_ids) else None

    def decode(self, token_ids: Sequence[int], *, skip_hidden: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_hidden))

    def token_bytes(self, token_id: int) -> bytes | None:
        """None: PaddleNLP has no such rule that holds for every tokenizer."""
        return None
