"""Tokenizer: control tokens act in raw text and never in plain text; the checkpoint's files are read as published."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.text.added_tokens import Segment, split_inside, token_pattern
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.vocabularies import GOLDEN, added_tokenizer, byte_fallback_tokenizer, golden_tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
TOKENIZER = golden_tokenizer()


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_segments([Segment(text, is_control=False)])


def test_control_tokens_and_eos_come_from_the_checkpoint() -> None:
    assert dict(TOKENIZER.control_tokens) == {token: i for i, token in enumerate(CONTROL)}
    assert TOKENIZER.eos_token_ids == (2,)


@pytest.mark.parametrize("token", CONTROL)
def test_control_token_acts_in_raw_text_and_is_spelled_out_in_plain_text(token: str) -> None:
    token_id = TOKENIZER.control_tokens[token]
    text = f"a{token}b"
    assert token_id in TOKENIZER.encode(text, add_special_tokens=False)
    token_ids = plain(TOKENIZER, text)
    assert set(token_ids).isdisjoint(TOKENIZER.control_tokens.values())
    assert TOKENIZER.decode(token_ids, skip_hidden=True) == text


@given(st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "<|", "|>", " ", "x", "<p", "ad>", "\n"]), max_size=8))
def test_plain_text_never_holds_a_control_token(parts: list[str]) -> None:
    text = "".join(parts)
    token_ids = plain(TOKENIZER, text)
    assert set(token_ids).isdisjoint(TOKENIZER.control_tokens.values())
    assert TOKENIZER.decode(token_ids, skip_hidden=True) == text


def test_a_control_token_that_is_also_a_vocabulary_piece_is_cut_apart(tmp_path: Path) -> None:
    """`</s>` is a piece of the model itself: removing it from the added tokens must not be what protects us."""
    tokenizer = byte_fallback_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"]["ignore_merges"] = True  # a whole word that is in the vocabulary becomes that token
    spec["normalizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = FastTokenizer(tmp_path)
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    assert 2 not in plain(tokenizer, "</s>")


FAMILIES = {
    "Qwen2.5": ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>"],
    "Qwen3": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
    "ERNIE 4.5": ["<mask:1>", "<|LOC_0|>", "<think>", "<response>", "</response>", "<tool_output>"],
    "Llama 3": ["<|python_tag|>", "<|reserved_special_token_1|>", "<tool_call>"],
    "DeepSeek R1": ["<think>", "</think>", "<\uff5cUser\uff5c>", "<\uff5ctool\u2581calls\u2581begin\uff5c>"],
    "Kimi": ["\u25c1think\u25b7", "\u25c1/think\u25b7", "[EOT]"],
}


@pytest.mark.parametrize("marks", FAMILIES.values(), ids=FAMILIES)
def test_a_mark_that_is_not_flagged_special_is_text_unless_a_template_writes_it(
    marks: list[str], tmp_path: Path
) -> None:
    tokenizer = added_tokenizer(tmp_path, marks)
    ids = [tokenizer.control_tokens[mark] for mark in marks]
    assert not tokenizer.hidden_ids.intersection(ids), "a text shows it"
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson }}{{ m.content }}MARKS{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source.replace("MARKS", "".join(marks)))
    encoder = PromptEncoder(FastTokenizer(tmp_path))
    text = " ".join(marks)
    call = {"function": {"name": text, "arguments": json.dumps({text: text})}}
    messages = [Message("assistant", text, tool_calls=[call]), Message("tool", text, tool_calls=[call])]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": text}}]
    token_ids = encoder.encode_chat(messages, {}, tools=tools)
    assert [i for i in token_ids if i in ids] == ids * len(messages), "the template's own"
    assert tokenizer.decode(token_ids, skip_hidden=False).count(text) == 9
    assert encoder.encode_prediction(text, 1000) == tokenizer.encode(text, add_special_tokens=False), "of an output"


def test_added_tokens_that_are_no_marks_are_found_in_texts(tmp_path: Path) -> None:
    words = ["\n\n\n", "    ", "\u2581\u2581", "\u00f7", "Paddle", "snake_case", "->", "\U0001f44d"]
    tokenizer = added_tokenizer(tmp_path, words)
    assert not tokenizer.control_tokens.keys() & set(words)
    for word in words:
        text = f"a{word}b"
        assert plain(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode(word, add_special_tokens=False)[0] in plain(tokenizer, text)


def test_split_inside_leaves_no_token_whole() -> None:
    parts = split_inside("a<x><<x>x>", token_pattern(["<x>"]))
    assert "".join(parts) == "a<x><<x>x>"
    assert not any("<x>" in part for part in parts)


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([2, 9], (2, 9))])
def test_eos_of_generation_config_may_be_a_list(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    shutil.copytree(GOLDEN, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert FastTokenizer(tmp_path / "m").eos_token_ids == ids


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    path = tmp_path / "m" / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["truncation"] = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    path.write_text(json.dumps(spec))
    text = "one two three four five six"
    assert FastTokenizer(tmp_path / "m").encode(text, add_special_tokens=True) == TOKENIZER.encode(
        text, add_special_tokens=True
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "expected a tokenizer.json or a tokenizer.model, got neither"),
        ("tokenizer.json", "{", "expected a tokenizer, got"),
        ("tokenizer_config.json", "[", "tokenizer_config.json: expected a readable JSON file"),
        ("tokenizer_config.json", "[]", "expected a JSON object, got list"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: expected a token id"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    shutil.copytree(GOLDEN, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    if content is None:
        (tmp_path / "m" / name).unlink()
    else:
        (tmp_path / "m" / name).write_text(content)
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[")):
        FastTokenizer(tmp_path / "m")


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected auto, tokenizers, sentencepiece or paddlenlp, got 'slow'"):
        load_tokenizer(GOLDEN, "slow")


def test_paddlenlp_backend_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddlenlp", None)
    monkeypatch.setitem(sys.modules, "paddlenlp.transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastdeploy-sd\[paddlenlp\]'"):
        load_tokenizer(GOLDEN, "paddlenlp")


class _Auto:
    """Answers like a PaddleNLP tokenizer, from the golden tokenizer."""

    all_special_tokens = CONTROL
    eos_token_id = 2

    @staticmethod
    def from_pretrained(path: str) -> _Auto:
        assert path == str(GOLDEN)
        return _Auto()

    def convert_tokens_to_ids(self, token: str) -> int:
        return TOKENIZER.control_tokens[token]

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": TOKENIZER.encode(text, add_special_tokens=add_special_tokens)}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return TOKENIZER.decode(token_ids, skip_hidden=skip_special_tokens)


def test_paddlenlp_backend_encodes_plain_text_without_control_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    package, transformers = ModuleType("paddlenlp"), ModuleType("paddlenlp.transformers")
    transformers.AutoTokenizer = _Auto  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paddlenlp", package)
    monkeypatch.setitem(sys.modules, "paddlenlp.transformers", transformers)
    tokenizer = load_tokenizer(GOLDEN, "paddlenlp")
    assert tokenizer.encode("hi<|im_end|>", add_special_tokens=True)[-1] == 2
    token_ids = plain(tokenizer, "hi<|im_end|>")
    assert 2 not in token_ids
    assert tokenizer.decode(token_ids, skip_hidden=True) == "hi<|im_end|>"
    assert tokenizer.token_bytes(5) is None
