"""The bytes of each token of a vocabulary, where it defines them token by token, and a bound for its longest token.

Byte-level BPE (GPT-2's alphabet) and SentencePiece with byte fallback do, which makes incremental detokenization exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

BYTE_PIECES = frozenset(f"<0x{b:02X}>" for b in range(256))
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE. Source: openai/gpt-2 src/encoder.py, bytes_to_unicode."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


class TokenBytes:
    """Bytes by token id, computed on first use; `decoder` is that object of tokenizer.json."""

    def __init__(self, id_to_token: Callable[[int], str | None], decoder: dict[str, Any] | None) -> None:
        self._id_to_token = id_to_token
        self._to_bytes = _converter(decoder)
        self._cache: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, b"" for an id without one, None when this vocabulary has no such rule."""
        if self._to_bytes is None:
            return None
        found = self._cache.get(token_id)
        if found is None:
            token = self._id_to_token(token_id)
            found = self._cache[token_id] = b"" if token is None else self._to_bytes(token)
        return found


def _converter(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    steps = (decoder or {}).get("decoders", [decoder] if decoder else [])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replacements = [_replacement(step) for step in steps if step["type"] == "Replace"]
        # Strip only removes the space that the encoder put before the very first word; generated text has none.
        return None if None in replacements else _byte_fallback
    return None


def _replacement(step: dict[str, Any]) -> str | None:
    """The only replacement that can be done token by token without looking: the word border becomes a space."""
    return " " if step.get("pattern") == {"String": "\u2581"} and step.get("content") == " " else None


_ALPHABET = byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[c] for c in token)
    except KeyError:  # an added token, written as it is
        return token.encode("utf-8")


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode("utf-8")


# Characters of input per character left by a normalizer, at most. A composed character comes from 4 others at most:
# no canonical decomposition of Unicode is longer, and no compatibility decomposition is empty.
_NORMALIZERS = {"NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that drop nothing.
_LOSSLESS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}


def longest_token(spec: Mapping[str, Any]) -> int | None:
    """Return the most characters that one token can stand for, so that a text that is far too long is refused at once.

    None = no bound: a step of the tokenizer.json drops text, joins unknown characters into one token, or is not known.
    """
    model = spec["model"]
    factor = _shrinks_by(spec.get("normalizer"))
    if factor is None or _drops(spec.get("pre_tokenizer")) or not _spells_everything(model, spec):
        return None
    added = spec.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token takes any amount of whitespace with it
    vocab = model["vocab"]
    pieces = vocab if isinstance(vocab, Mapping) else [piece for piece, _ in vocab]
    return factor * max(map(len, [" ", *pieces, *(token["content"] for token in added)]))


def _steps(step: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    return step[key] if step["type"] == "Sequence" else [step]


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> int | None:
    factor = 1
    for step in _steps(normalizer, "normalizers") if normalizer else ():
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] in _NORMALIZERS:
            factor *= _NORMALIZERS[step["type"]]
        else:
            return None
    return factor


def _drops(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return any(
        step["type"] not in _LOSSLESS and (step["type"] != "Split" or step["behavior"] == "Removed")
        for step in (_steps(pre_tokenizer, "pretokenizers") if pre_tokenizer else ())
    )


def _spells_everything(model: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Whether every character becomes a token of its own at the least, so that nothing unknown is joined or dropped."""
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    vocab = model["vocab"]
    pieces = set(vocab) if isinstance(vocab, Mapping) else {piece for piece, _ in vocab}
    if model.get("byte_fallback") and pieces >= BYTE_PIECES:
        return True
    steps = [
        step
        for part, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
        for step in (_steps(spec[part], key) if spec.get(part) else ())
    ]
    return any(step["type"] == "ByteLevel" for step in steps) and pieces >= byte_level_alphabet().keys()
