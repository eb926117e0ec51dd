"""The length of the longest token: a bound that no text breaks, or None."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.text.token_bytes import longest_token
from tests.unit.text.vocabularies import GOLDEN, byte_fallback_tokenizer, golden_tokenizer, word_tokenizer

TOKENIZER = golden_tokenizer()
SPEC: dict[str, Any] = json.loads((GOLDEN / "tokenizer.json").read_text())
LONGEST = max(map(len, SPEC["model"]["vocab"]))


@given(st.text(max_size=40) | st.text(alphabet=" \n\t-=", max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound_allows(text: str) -> None:
    assert TOKENIZER.max_token_chars is not None
    assert len(text) <= len(TOKENIZER.encode(text, add_special_tokens=False)) * TOKENIZER.max_token_chars


def test_byte_fallback_has_a_bound_and_words_have_none(tmp_path: Path) -> None:
    assert byte_fallback_tokenizer(tmp_path).max_token_chars == len("<0x00>")
    assert word_tokenizer(tmp_path).max_token_chars is None


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (None, 1),
        ({"type": "NFC"}, 4),
        ({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}, 4),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, 1),
        ({"type": "Replace", "pattern": {"String": "  "}, "content": " "}, None),
        ({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}, None),
        ({"type": "StripAccents"}, None),
        ({"type": "Precompiled", "precompiled_charsmap": ""}, None),
    ],
)
def test_a_normalizer_that_shrinks_widens_the_bound_or_ends_it(normalizer: Any, factor: int | None) -> None:
    assert longest_token(SPEC | {"normalizer": normalizer}) == (None if factor is None else factor * LONGEST)


def test_what_drops_or_joins_text_has_no_bound() -> None:
    removed = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    assert longest_token(SPEC | {"pre_tokenizer": removed}) is None
    vocab = {piece: i for piece, i in SPEC["model"]["vocab"].items() if piece != "!"}
    assert longest_token(SPEC | {"model": SPEC["model"] | {"vocab": vocab}}) is None
    greedy = [{"id": 0, "content": "<pad>", "rstrip": True}]
    assert longest_token(SPEC | {"added_tokens": greedy}) is None
