"""An upper bound for the text of one token, where a tokenizer.json proves one.

With a bound a text that is far too long is refused by its length, before any of it is encoded. Owns the rule for each
kind of step; a step that is not listed here proves nothing. Knows no tokenizer object, only the file's content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_sd.text.token_bytes import BYTE_PIECES, byte_level_alphabet

# Characters of input per character left by a normalizer, at most. A composed character comes from 4 others at most:
# no canonical decomposition of Unicode is longer, and no compatibility decomposition is empty.
_NORMALIZERS = {"NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that drop nothing.
_LOSSLESS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}


def longest_token(spec: Mapping[str, Any]) -> int | None:
    """Return the largest number of characters of a text that one token can stand for, None where there may be none.

    None is known when a step drops text (whitespace, accents) or joins unknown characters into one token.

    Args:
        spec: content of a tokenizer.json that the library has read.
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
