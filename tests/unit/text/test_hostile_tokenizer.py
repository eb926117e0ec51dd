"""A tokenizer.json that is damaged or hostile: refused in one line, or an error for the request that meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from fastdeploy_sd.errors import BadRequest, CheckpointError, InternalError
from fastdeploy_sd.text.added_tokens import token_pattern
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.prompt import PromptEncoder
from tests.unit.text.vocabularies import GOLDEN

pytestmark = pytest.mark.slow

SPEC: dict[str, Any] = json.loads((GOLDEN / "tokenizer.json").read_text())
MODEL = SPEC["model"]
VOCAB = MODEL["vocab"]


def encoder(directory: Path, spec: object) -> PromptEncoder:
    (directory / "tokenizer.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return PromptEncoder(FastTokenizer(directory))


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        '{"version": "' + "x" * 100_000 + '"}',
        SPEC | {"model": 5},
        SPEC | {"normalizer": [[]]},
        SPEC | {"decoder": {"type": "x" * 1000}},
        SPEC | {"model": MODEL | {"vocab": VOCAB | {"x": -1}}},
        SPEC | {"model": MODEL | {"vocab": VOCAB | {"x": 1 << 40}}},
        SPEC | {"model": MODEL | {"vocab": VOCAB | {"x": "1"}}},
        SPEC | {"model": MODEL | {"vocab": VOCAB | {"x": (1 << 32) - 1}}},
        SPEC | {"model": MODEL | {"merges": [["a", "nowhere"]]}},
        SPEC | {"added_tokens": [{"id": -1, "content": "x"}]},
        SPEC | {"added_tokens": {}},
        SPEC | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    ],
    ids=range(16),
)
def test_a_damaged_tokenizer_is_refused_in_one_line(spec: object, tmp_path: Path) -> None:
    try:
        made = encoder(tmp_path, spec)
    except CheckpointError as error:
        message = str(error)
    else:
        made.encode_chat([Message("user", "hello <|im_end|> world")], {})
        return
    assert "\n" not in message
    assert len(message) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("token", ["!", "a", "Ġthe"])
def test_two_tokens_of_one_id_are_refused_or_harmless(token: str, tmp_path: Path) -> None:
    """The library reads such a file, and cannot read what it writes then."""
    spec = SPEC | {"model": MODEL | {"vocab": VOCAB | {token: 31}}}
    try:
        made = encoder(tmp_path, spec)
    except CheckpointError:
        return
    made.encode_chat([Message("user", "hello the !a")], {})


def test_a_vocabulary_with_gaps_is_served(tmp_path: Path) -> None:
    made = encoder(tmp_path, SPEC | {"model": MODEL | {"vocab": VOCAB | {"zz": 1_000_000}}})
    assert made.encode_text("hello")


def test_a_pattern_that_backtracks_fails_one_text(tmp_path: Path) -> None:
    """The regex engine gives up after so many steps, and the library panics: not an Exception for Python."""
    pattern = tokenizers.Regex("(?:x+x+)+y")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"x": 0, "z": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made = encoder(tmp_path, tokenizer.to_str())
    for _ in range(2):
        assert made.encode_text("xxzz") == [0, 0, 1, 1]
        with pytest.raises(BadRequest, match=r"prompt: expected text that the model's tokenizer can encode, got its"):
            made.encode_text("x" * 5000)
        with pytest.raises(BadRequest, match=r"prompt: expected text that the model's tokenizer can encode, got its"):
            made.encode_chat([Message("user", "x" * 5000)], {})


def test_output_that_the_library_cannot_decode_fails_one_request() -> None:
    with pytest.raises(InternalError, match=r"^output: expected tokens"):
        FastTokenizer(GOLDEN).decode([1 << 40], skip_hidden=True)


def test_random_ids_of_training_are_off(tmp_path: Path) -> None:
    made = encoder(tmp_path, SPEC | {"model": MODEL | {"dropout": 0.9}})
    plain = encoder(tmp_path, SPEC)
    text = "the quick brown fox " * 50
    assert made.encode_text(text) == plain.encode_text(text)


def test_a_pattern_of_tokens_finds_the_leftmost_longest() -> None:
    tokens = ["a", "ab", "abc", "b", "bcd", "<|x|>", "<|xy|>", "(", "a\nb"]
    pattern = token_pattern(tokens)
    assert pattern.findall("abcd<|xy|>a\nb(ab<|x|><|z|>") == ["abc", "<|xy|>", "a\nb", "(", "ab", "<|x|>"]
    assert token_pattern([]).search("abc") is None
    with pytest.raises(CheckpointError, match="added tokens: expected texts that can be searched for"):
        token_pattern(["a" * n for n in range(1, 3000)])
