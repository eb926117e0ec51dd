"""The Tokenizer interface, and its implementation on the `tokenizers` library.

Owns the difference between *control tokens*, which steer the model (turn borders, end of text), and ordinary ones. A
control token written in a raw prompt is parsed; in text that must stay text (`encode_plain`) it is spelled out. Knows
no chat template, no request and no Paddle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from fastdeploy_sd.entrypoints.text.token_bytes import TokenBytes
from fastdeploy_sd.entrypoints.text.token_length import longest_token
from fastdeploy_sd.entrypoints.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError
from fastdeploy_sd.files import read_text

# Turn markers such as <|User|>, with ASCII or full-width bars, that some checkpoints do not flag as special.
_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


class Tokenizer(Protocol):
    """Text <-> token ids of one checkpoint. Safe to use from several threads."""

    @property
    def files(self) -> TokenizerFiles:
        """Special tokens by role, end-of-text ids, chat template."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of each control token: those flagged special, and turn markers."""
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

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` taken as plain text: no control token is among them.

        Raises:
            BadRequest: the text cannot be written without a control token.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_hidden: bool) -> str:
        """Return the text of a whole sequence; ids unknown to the tokenizer have no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes a token adds in the middle of a text, None where that depends on its neighbours."""
        ...


def load_tokenizer(directory: Path, backend: str = "auto") -> Tokenizer:
    """Load a checkpoint's tokenizer.

    Args:
        directory: holds tokenizer.json (or what the paddlenlp backend reads).
        backend: "tokenizers", "paddlenlp", or "auto", which is "tokenizers".

    Raises:
        CheckpointError: a file is missing or malformed.
        ConfigError: the backend is unknown or not installed.
    """
    if backend == "paddlenlp":
        # Imported only when chosen: it brings in Paddle, which is slow and which no other part of this process needs.
        from fastdeploy_sd.entrypoints.text.paddlenlp_tokenizer import PaddleNLPTokenizer

        return PaddleNLPTokenizer(directory)
    if backend not in ("auto", "tokenizers"):
        raise ConfigError(
            f"tokenizer_backend: expected auto, tokenizers or paddlenlp, got {backend!r}", param="tokenizer_backend"
        )
    return FastTokenizer(directory)


class FastTokenizer:
    """A tokenizer.json, run by the `tokenizers` library.

    Raises:
        CheckpointError: tokenizer.json is missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        self.files = read_tokenizer_files(directory)
        self._tokenizer, spec = _load(path)
        added = self._tokenizer.get_added_tokens_decoder()
        self.hidden_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_tokens = {t.content: i for i, t in added.items() if t.special or _MARKER.fullmatch(t.content)}
        for text in self.files.special_tokens.values():
            token_id = self._tokenizer.token_to_id(text)
            if token_id is not None:
                self.control_tokens[text] = token_id
        self._token_bytes = TokenBytes(self._tokenizer.id_to_token, spec.get("decoder"))
        self.max_token_chars = longest_token(spec)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the checkpoint's list, or the tokenizer's end-of-text token."""
        if self.files.eos_token_ids:
            return self.files.eos_token_ids
        token_id = self._tokenizer.token_to_id(self.files.special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its control tokens; built on first use, few conversations need it."""
        spec = json.loads(self._tokenizer.to_str())
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in self.control_tokens]
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, control tokens parsed; `add_special_tokens` adds e.g. a leading BOS."""
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` taken as plain text: no control token is among them.

        Raises:
            BadRequest: the text cannot be written without a control token.
        """
        if not any(token in text for token in self.control_tokens):
            return self.encode(text, add_special_tokens=False)
        token_ids = _encode(self._plain, text, False)
        if self._control_ids.isdisjoint(token_ids):
            return token_ids
        # A control token can also be a piece of the model's own vocabulary: then it is spelled out by force.
        return [i for part in split_inside(text, self.control_tokens) for i in self._plain_part(part)]

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.control_tokens.values())

    def _plain_part(self, part: str) -> list[int]:
        token_ids = _encode(self._plain, part, False)
        if not self._control_ids.isdisjoint(token_ids):
            raise BadRequest(f"messages: expected text without control tokens, got {part!r}", param="messages")
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_hidden: bool) -> str:
        """Return the text of a whole sequence; ids unknown to the tokenizer have no text."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_hidden)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes a token adds in the middle of a text, None where that depends on its neighbours."""
        return self._token_bytes.of(token_id)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode one text as a batch: unlike `encode`, that lets other threads run meanwhile and finds no offsets."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def split_inside(text: str, tokens: Iterable[str]) -> list[str]:
    """Cut `text` after the first character of every occurrence of a token, so that none is left whole.

    Occurrences may overlap and nest: parts are searched again until nothing is found. Tokens of one character cannot
    be cut and stay.
    """
    pattern = re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True) if len(t) > 1) or r"(?!)")
    parts, start = [], 0
    while match := pattern.search(text, start):
        parts.append(text[start : match.start() + 1])
        start = match.start() + 1
    return [*parts, text[start:]]


def _load(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    try:
        text = read_text(path)
        tokenizer = tokenizers.Tokenizer.from_str(text)
        spec = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected a tokenizer.json, got none (tokenizer_backend paddlenlp reads other kinds)"
        ) from None
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise CheckpointError(f"{path}: expected a tokenizer, got {error}") from None
    tokenizer.no_truncation()  # a file may ask to cut or pad silently: prompts are never cut
    tokenizer.no_padding()
    return tokenizer, spec
