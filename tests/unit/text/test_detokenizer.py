"""Detokenizer: no half characters, the whole text in the end, and every kind of vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_sd.text.detokenizer import ByteDetokenizer, WindowDetokenizer, create_detokenizer
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.token_bytes import byte_level_alphabet
from tests.unit.text.vocabularies import byte_fallback_tokenizer, golden_tokenizer, word_tokenizer

TOKENIZER = golden_tokenizer()
TEXTS = ["plain words", "Zürich \u4f60\u597d, \U0001f9d1\u200d\U0001f680!", "  \n\t x", "e\u0301\u00e9", ""]


def pieces_of(tokenizer: FastTokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = create_detokenizer(tokenizer, [])
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_without_half_characters(text: str) -> None:
    pieces = pieces_of(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(max_size=30))
def test_any_text_comes_back(text: str) -> None:
    assert "".join(pieces_of(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False))) == text


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_any_tokens_give_what_decoding_them_at_once_gives(token_ids: list[int]) -> None:
    assert "".join(pieces_of(TOKENIZER, token_ids)) == TOKENIZER.decode(token_ids, skip_hidden=True)


def test_a_character_cut_short_is_shown_only_at_the_end() -> None:
    token_ids = TOKENIZER.encode("\U0001f680", add_special_tokens=False)
    assert len(token_ids) > 1, "the test needs a character of several tokens"
    pieces = pieces_of(TOKENIZER, token_ids[:-1])
    assert pieces[:-1] == [""] * (len(token_ids) - 1)
    assert pieces[-1] == "\ufffd"


def test_control_tokens_and_ids_beyond_the_vocabulary_add_nothing() -> None:
    assert pieces_of(TOKENIZER, [2, 100_000]) == ["", "", ""]


def test_byte_level_alphabet_covers_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


@pytest.fixture
def sentencepiece(tmp_path: Path) -> FastTokenizer:
    return byte_fallback_tokenizer(tmp_path)


def test_byte_fallback_joins_byte_tokens(sentencepiece: FastTokenizer) -> None:
    token_ids = sentencepiece.encode("ab \u20ac ab", add_special_tokens=False)
    pieces = pieces_of(sentencepiece, token_ids)
    assert isinstance(create_detokenizer(sentencepiece, []), ByteDetokenizer)
    assert "".join(pieces) == " ab \u20ac ab", "a continuation keeps its leading space"
    assert not any("\ufffd" in piece for piece in pieces)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="abk \u00e9\u20ac\U0001f680", max_size=20))
def test_byte_fallback_gives_any_text_back(sentencepiece: FastTokenizer, text: str) -> None:
    pieces = pieces_of(sentencepiece, sentencepiece.encode(text, add_special_tokens=False))
    assert "".join(pieces) == (" " + text if text else "")


def test_other_vocabularies_are_decoded_in_context(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path)
    token_ids = tokenizer.encode("hello worlds going", add_special_tokens=False)
    detokenizer = create_detokenizer(tokenizer, [])
    assert isinstance(detokenizer, WindowDetokenizer)
    assert [detokenizer.push(i) for i in token_ids] == ["hello", " world", "s", " go", "ing"]


def test_context_of_the_prompt_decides_the_first_space(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path)
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    world = tokenizer.encode("world", add_special_tokens=False)
    assert create_detokenizer(tokenizer, prompt).push(world[0]) == " world"


def test_window_detokenizer_agrees_with_the_exact_one() -> None:
    token_ids = TOKENIZER.encode(" ".join(TEXTS), add_special_tokens=False)
    window = WindowDetokenizer(TOKENIZER, [], TOKENIZER.hidden_ids)
    assert "".join([*(window.push(i) for i in token_ids), window.finish()]) == " ".join(TEXTS)


def test_window_detokenizer_does_not_hold_garbage_forever() -> None:
    window = WindowDetokenizer(TOKENIZER, [], TOKENIZER.hidden_ids)
    half = TOKENIZER.encode("\U0001f680", add_special_tokens=False)[0]
    assert any(window.push(half) for _ in range(40))
