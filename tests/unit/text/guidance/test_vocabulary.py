"""The vocabulary that grammars are compiled for says of every token what our tokenizers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

import fastdeploy_sd
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.guidance.vocabulary import VocabularyError, load_vocabulary, make_vocabulary
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(fastdeploy_sd.__file__).parent / "demo_model"
VOCAB_SIZE = 4100  # some more ids than the tokenizer has
IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(DEMO, "auto", VOCAB_SIZE, (IM_END,))


class Spelled:
    """A tokenizer of single letters, with what a test wants of it."""

    control_tokens: Mapping[str, int] = {"</s>": 0}
    hidden_ids: frozenset[int] = frozenset({0})
    eos_token_ids: tuple[int, ...] = (0,)
    num_ids = 5
    tokens: Sequence[bytes | None] = [b"</s>", b"a", b"b", b" a", b"ab"]

    def token_bytes(self, token_id: int) -> bytes | None:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        return [self.tokens.index(c.encode()) for c in segments[0].text if c in "ab"]


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def test_text_is_written_as_the_model_was_taught_to(vocabulary: LLTokenizer) -> None:
    tokenizer = load_tokenizer(DEMO)
    for text in ['"name": "value"', "\n\n  indented", " a space in front", "<|im_start|>system", "日本語"]:
        ids = LLMatcher(vocabulary, f"start: {text!r}".replace("'", '"') if '"' not in text else _spelled(text))
        found = ids.compute_ff_tokens()
        assert b"".join(tokenizer.token_bytes(i) or b"" for i in found) == text.encode()
        assert IM_START not in found
    assert vocabulary.tokenize_str(" a space") == tokenizer.encode_segments([Segment("x a space", False)])[1:]


def _spelled(text: str) -> str:
    return 'start: "' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_hidden_tokens_and_the_end_need_their_names(vocabulary: LLTokenizer) -> None:
    assert IM_START not in allowed(LLMatcher(vocabulary, "start: /(.|\\n)*/"))
    assert allowed(LLMatcher(vocabulary, 'start: <|im_start|> "a"')) == [IM_START]
    assert allowed(LLMatcher(vocabulary, f'start: <[{IM_START}]> "a"')) == [IM_START]
    matcher = LLMatcher(vocabulary, 'start: "a"')
    assert matcher.consume_tokens(vocabulary.tokenize_str("a"))
    assert allowed(matcher) == [IM_END]


def test_ids_without_a_token_are_never_allowed(vocabulary: LLTokenizer) -> None:
    assert max(allowed(LLMatcher(vocabulary, "start: /(.|\\n)*/"))) < 4096


def test_every_end_of_the_model_and_of_the_tokenizer_ends_a_grammar() -> None:
    vocabulary = make_vocabulary(cast(Tokenizer, Spelled()), 6, (2,))
    matcher = LLMatcher(vocabulary, 'start: "a"')
    assert matcher.consume_token(1)
    assert allowed(matcher) == [0, 2]


def test_a_tokenizer_that_joins_forced_text_with_what_stands_before_is_done_without() -> None:
    class Joining(Spelled):
        def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
            return [4]

    assert LLMatcher(make_vocabulary(cast(Tokenizer, Joining()), 5, ()), 'start: "aab"').compute_ff_tokens() == [1, 4]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"eos_token_ids": ()}, "end-of-text token"), ({"tokens": [b"</s>", None, b"a"]}, "same bytes")],
)
def test_an_unusable_vocabulary_is_an_error_that_says_why(fields: dict[str, object], message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        make_vocabulary(cast(Tokenizer, type("Wrong", (Spelled,), fields)()), 5, ())


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"structured output: .*tokenizer\.json"):
        load_vocabulary(tmp_path, "auto", 5, (0,))
