"""Tokenizer: control tokens act in raw text and never in plain text; the checkpoint's files are read as published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.text.added_tokens import Segment, split_inside, token_pattern
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.vocabularies import (
    GOLDEN,
    SENTENCEPIECE,
    added_tokenizer,
    byte_fallback_tokenizer,
    golden_tokenizer,
)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
TOKENIZER = golden_tokenizer()


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_segments([Segment(text, is_control=False)])


def test_control_tokens_and_eos_come_from_the_checkpoint() -> None:
    assert dict(TOKENIZER.control_tokens) == {token: i for i, token in enumerate(CONTROL)}
    assert TOKENIZER.eos_token_ids == (2,)


def test_another_chat_template_stands_in_for_the_checkpoints(tmp_path: Path) -> None:
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    file = tmp_path / "own.jinja"
    file.write_text(own)
    assert TOKENIZER.files.chat_template not in (None, own)
    for source in (own, str(file)):
        tokenizer = load_tokenizer(GOLDEN, "auto", source)
        assert tokenizer.files.chat_template == own
        ids = PromptEncoder(tokenizer).encode_chat([Message("user", "hi")], {})
        assert tokenizer.decode(ids, skip_hidden=False) == "user: hi\n"
    with pytest.raises(ConfigError, match=r"chat_template: expected a text file, or a template with .* got 'nowhere'"):
        load_tokenizer(GOLDEN, "auto", "nowhere")


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


def test_tokenizers_of_plain_text_share_the_model() -> None:
    """A copy would take as much memory again; all else is as in a copy."""
    tokenizer = golden_tokenizer()
    assert isinstance(tokenizer, FastTokenizer)
    own, [start, inner] = tokenizer._tokenizer, tokenizer._plain
    spec = json.loads(own.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in tokenizer.control_tokens
    assert json.loads(start.to_str()) == json.loads(inner.to_str()) == spec
    own.model.dropout = 0.5
    assert start.model.dropout == inner.model.dropout == 0.5


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
    with pytest.raises(ConfigError, match="expected auto, tokenizers or sentencepiece, got 'slow'"):
        load_tokenizer(GOLDEN, "slow")


def test_a_backend_that_is_gone_says_what_reads_its_files() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_backend: .*got 'paddlenlp': auto reads the files of PaddleNLP's"):
        config_from_kwargs(model=str(GOLDEN), tokenizer_backend="paddlenlp")


TEXTS = ["hello world", "Z\u00fcrich \u4f60\u597d \U0001f680", "def f(x):\n    return x", "  a  b\n\n c", "it's 1234"]


def qwen2(directory: Path, tokenizer_class: str | None = "Qwen2Tokenizer") -> Tokenizer:
    """The golden tokenizer in the files that Qwen2's slow tokenizer writes, and PaddleNLP's."""
    model = json.loads((GOLDEN / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


def test_qwen2s_vocabulary_gives_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = qwen2(tmp_path)
    assert tokenizer.eos_token_ids == (2,)
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        assert token_ids == TOKENIZER.encode(text, add_special_tokens=True)
        assert tokenizer.decode(token_ids, skip_hidden=True) == text
    assert plain(tokenizer, "a<|im_end|>b") == plain(TOKENIZER, "a<|im_end|>b")


def test_a_vocabulary_of_another_class_or_without_merges_is_refused(tmp_path: Path) -> None:
    for name, shown in (("BertTokenizer", "'BertTokenizer'"), (None, "null")):
        with pytest.raises(CheckpointError, match=f"tokenizer_class: expected Qwen2Tokenizer or .*, got {shown}"):
            qwen2(tmp_path, name)
    qwen2(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"expected a merges.txt with the vocab.json, got none"):
        load_tokenizer(tmp_path)


def test_a_llama_model_is_read_under_the_name_that_paddlenlp_gives_it(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizers = []
    for folder, name in ((tmp_path / "a", "sentencepiece.bpe.model"), (tmp_path / "b", "tokenizer.model")):
        folder.mkdir()
        shutil.copy(SENTENCEPIECE / "bpe-prefix.model", folder / name)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizers.append(load_tokenizer(folder))
    for text in TEXTS:
        first, second = (tokenizer.encode(text, add_special_tokens=True) for tokenizer in tokenizers)
        assert first == second
