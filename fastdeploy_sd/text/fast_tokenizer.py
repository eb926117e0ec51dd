"""The Tokenizer interface on a tokenizer.json, or on the vocab.json and merges.txt of Qwen2, run by `tokenizers`."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from fastdeploy_sd.errors import BadRequest, CheckpointError, InternalError, shown
from fastdeploy_sd.process.files import describe, read_json, read_text
from fastdeploy_sd.text import channels
from fastdeploy_sd.text.added_tokens import (
    WHITE_SPACE,
    AddedToken,
    Segment,
    apply_borders,
    encode_spelled_out,
    token_pattern,
)
from fastdeploy_sd.text.token_bytes import TokenBytes, longest_token
from fastdeploy_sd.text.tokenizer_files import read_tokenizer_files

_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}
_QWEN2 = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# Words as they are cut before the byte pairs of each are merged. Source: transformers, `convert_slow_tokenizer.py`,
# class Qwen2Converter.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class FastTokenizer:
    """A vocabulary with the tokens that other files add; see Tokenizer. Raises CheckpointError."""

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        path = directory / "tokenizer.json"
        self.files = read_tokenizer_files(directory, chat_template)
        self._tokenizer, spec = _load(path, self.files.tokenizer_class)
        _add_missing(path, self._tokenizer, self.files.added_tokens)
        added = _added_tokens(self._tokenizer, self.files.special_tokens.values())
        self.hidden_ids = frozenset(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special)
        self._controls = {text: token for text, token in added.items() if token.is_control}
        self.control_tokens = {text: i for text, token in self._controls.items() if (i := token.token_id) is not None}
        self._control_ids = frozenset(self.control_tokens.values()) - {_unknown_id(self._tokenizer, spec["model"])}
        self._any_control = token_pattern(self._controls)
        self._token_bytes = TokenBytes(self._tokenizer.id_to_token, spec.get("decoder"))
        self.max_token_chars = longest_token(spec | {"added_tokens": [asdict(token) for token in added.values()]})

    @cached_property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        token_id = self._tokenizer.token_to_id(self.files.special_tokens.get("eos_token", ""))
        found = self.files.eos_token_ids or (() if token_id is None else (token_id,))
        # A file of gpt-oss may name the end of an answer alone, and a model goes on after a call that it does not end.
        has_channels = channels.CHANNEL in self.control_tokens
        ends = channels.TURN_ENDS if has_channels else ()
        return tuple(dict.fromkeys((*found, *(self.control_tokens[end] for end in ends if end in self.control_tokens))))

    @cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        """Two tokenizers in which no spelling makes a control token: for a prompt's start, and for what follows."""
        spec = json.loads(self._tokenizer.to_str())
        for token in spec["added_tokens"]:
            token["special"] = token["content"] in self.control_tokens
        start = inner = self._without_special_tokens(spec)
        if _drop_space_at_start(spec["pre_tokenizer"]):
            inner = self._without_special_tokens(spec)
        return start, inner

    def _without_special_tokens(self, spec: dict[str, Any]) -> tokenizers.Tokenizer:
        """Return a tokenizer of a description that shares this one's model, which has most of the memory."""
        try:
            found = tokenizers.Tokenizer.from_str(json.dumps(spec | {"model": _NO_MODEL, "added_tokens": []}))
            found.model = self._tokenizer.model
            for is_special, tokens in itertools.groupby(spec["added_tokens"], lambda token: token["special"]):
                added = [tokenizers.AddedToken(**_without_id(token)) for token in tokens]
                (found.add_special_tokens if is_special else found.add_tokens)(added)
        except BaseException as error:
            raise CheckpointError(f"tokenizer.json: expected a tokenizer, got {_reason(error)}") from None
        found.encode_special_tokens = True
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        start, inner = self._plain
        token_ids: list[int] = []
        for i, part in enumerate(apply_borders(segments, self._controls, WHITE_SPACE, _is_word)):
            if part.is_control:
                token_ids.append(self.control_tokens[part.text])
            else:
                token_ids += self._encode_plain(part.text, start if i == 0 else inner)
        return token_ids

    def _encode_plain(self, text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
        token_ids = _encode(tokenizer, text, False)
        if self._control_ids.isdisjoint(token_ids):
            return token_ids

        def encode(part: str) -> list[int] | None:
            found = _encode(self._plain[1], part, False)
            return found if self._control_ids.isdisjoint(found) else None

        # A control token can also be a piece of the model's own vocabulary: then it is spelled out by force.
        return encode_spelled_out(text, self._any_control, encode)

    def decode(self, token_ids: Sequence[int], *, skip_hidden: bool) -> str:
        try:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_hidden)
        except BaseException as error:
            reason = _reason(error)
            raise InternalError(
                f"output: expected tokens that the model's tokenizer can decode, got {reason}"
            ) from None

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._token_bytes.of(token_id)


def _load(path: Path, tokenizer_class: str | None) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and its content as the library writes it, whatever form the file has."""
    has_vocabulary = not os.path.lexists(path) and os.path.lexists(path.with_name("vocab.json"))
    try:
        content = _qwen2(path.parent, tokenizer_class) if has_vocabulary else read_text(path)
        tokenizer = tokenizers.Tokenizer.from_str(content)
        tokenizer.no_truncation()  # a file may ask to cut or pad silently: prompts are never cut
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # random ids, meant for training
        return tokenizer, json.loads(tokenizer.to_str())
    except FileNotFoundError:
        if has_vocabulary:
            raise CheckpointError(f"{path.parent}: expected a merges.txt with the vocab.json, got none") from None
        raise CheckpointError(f"{path}: expected a tokenizer.json or a tokenizer.model, got neither") from None
    except CheckpointError:
        raise
    except BaseException as error:
        raise CheckpointError(f"{path}: expected a tokenizer, got {_reason(error)}") from None


def _qwen2(directory: Path, tokenizer_class: str | None) -> str:
    """Return the tokenizer.json of a vocab.json and a merges.txt: byte-level pairs in the words of Qwen2."""
    if tokenizer_class not in _QWEN2:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: tokenizer_class: expected {' or '.join(_QWEN2)} with a vocab.json"
            f" and no tokenizer.json, got {shown(tokenizer_class)}"
        )
    lines = read_text(directory / "merges.txt").splitlines()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    spec = {
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": read_json(directory / "vocab.json"),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
    return json.dumps(spec)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode one text as a batch: unlike `encode`, that lets other threads run meanwhile and finds no offsets."""
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except BaseException as error:
        raise BadRequest(
            f"prompt: expected text that the model's tokenizer can encode, got its error {_reason(error)}",
            param="prompt",
        ) from None
    return ids


def _reason(error: BaseException) -> str:
    """Return an error of the library in one line. A panic of a Rust library is no Exception, and cannot be imported."""
    if isinstance(error, Exception):
        return describe(error)
    if type(error).__name__ == "PanicException":
        return describe(RuntimeError(str(error)))
    raise error


def _add_missing(path: Path, tokenizer: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    """Add what only the smaller files list, as transformers does: those with an id, or that the vocabulary has."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [t for t in tokens if t.content not in known]
    missing = [t for t in missing if t.token_id is not None or tokenizer.token_to_id(t.content) is not None]
    for token in sorted(missing, key=lambda t: -1 if t.token_id is None else t.token_id):
        flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        made = tokenizers.AddedToken(token.content, normalized=False, special=token.special, **flags)
        tokenizer.add_special_tokens([made]) if token.special else tokenizer.add_tokens([made])
        token_id = tokenizer.token_to_id(token.content)
        if token.token_id not in (None, token_id):
            raise CheckpointError(
                f"{path}: expected the token {token.content!r} with id {token.token_id}, as tokenizer_config.json or"
                f" added_tokens.json has it, got {token_id}"
            )


def _added_tokens(tokenizer: tokenizers.Tokenizer, roles: Iterable[str]) -> dict[str, AddedToken]:
    """Return text -> token of all that the tokenizer finds by text; those with a role (BOS, EOS ...) are special."""
    special = set(roles)
    return {
        t.content: AddedToken(t.content, i, t.special or t.content in special, t.lstrip, t.rstrip, t.single_word)
        for i, t in tokenizer.get_added_tokens_decoder().items()
    }


def _without_id(token: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in token.items() if key != "id"}


def _unknown_id(tokenizer: tokenizers.Tokenizer, model: dict[str, Any]) -> int | None:
    """The id that stands for any text without another; plain text may have it, though it is often flagged special."""
    unknown_id: int | None = model.get("unk_id")
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else unknown_id


def _drop_space_at_start(step: dict[str, Any] | None) -> bool:
    """Have a pre-tokenizer put no space before the first word; return whether it put one there and nowhere else."""
    if step is None:
        return False
    found = False
    for part in step["pretokenizers"] if step["type"] == "Sequence" else [step]:
        if part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
            found = True
    return found


def _is_word(character: str) -> bool:
    return re.fullmatch(r"\w", character) is not None
