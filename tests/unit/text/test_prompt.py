"""What cannot fit into the context is refused before it is encoded; what may fit is encoded."""

from __future__ import annotations

import pytest

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.prompt import PromptEncoder
from tests.unit.text.vocabularies import GOLDEN, golden_tokenizer

TOKENIZER = golden_tokenizer()


class Uncalled(FastTokenizer):
    """Fails when it has to encode."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"encoded {len(text)} characters")


def test_what_cannot_fit_is_refused_without_being_encoded() -> None:
    encoder = PromptEncoder(Uncalled(GOLDEN))
    message = r"prompt is too long: expected at most 511 tokens, as .* got at least \d+"
    with pytest.raises(BadRequest, match=message):
        encoder.encode_text("ab " * 100_000, 511)
    with pytest.raises(BadRequest, match=message):
        encoder.encode_chat([Message("user", "ab " * 100_000)], {}, 511)
    with pytest.raises(BadRequest, match=r"prompt is too long: .* got more than that of control tokens in messages"):
        encoder.encode_chat([Message("user", "<|im_end|>" * 100_000)], {}, 511)


def test_what_may_fit_is_encoded() -> None:
    longest = max((TOKENIZER.token_bytes(i) or b"" for i in range(4096)), key=len).decode()
    num_tokens = len(TOKENIZER.encode(longest * 100, add_special_tokens=False))
    assert len(PromptEncoder(TOKENIZER).encode_text(longest * 100, num_tokens)) == num_tokens
