"""tokenizer.model: the ids of the original tokenizers, text that streams as it is, and files that are refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import assume, given
from hypothesis import strategies as st

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.text.added_tokens import Segment, cut, token_pattern
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.detokenizer import ByteDetokenizer, create_detokenizer
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.sentencepiece_tokenizer import SentencePieceTokenizer
from fastdeploy_sd.text.tokenizer import load_tokenizer
from tests.unit.text.vocabularies import GOLDEN, SENTENCEPIECE, sentencepiece_files

CASES: dict[str, dict[str, Any]] = json.loads((SENTENCEPIECE / "cases.json").read_text())
ROLES = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}


def seeded_texts(count: int) -> list[str]:
    spec = importlib.util.spec_from_file_location("texts", SENTENCEPIECE / "texts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: list[str] = module.texts(count)
    return made


def case(name: str, directory: Path) -> SentencePieceTokenizer:
    files = dict(CASES[name]["files"])
    tokenizer = load_tokenizer(sentencepiece_files(directory, files.pop("model"), **files))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_the_original_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = case(name, tmp_path)
    texts = seeded_texts(CASES[name]["count"])
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert ids[: len(CASES[name]["ids"])] == CASES[name]["ids"]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == CASES[name]["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bpe", "bpe-prefix", "unigram"])
@given(text=st.text(max_size=60))
def test_text_without_added_tokens_is_the_library_s(model: str, text: str, tmp_path_factory: Any) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE / f"{model}.model"))
    ids = range(library.get_piece_size())
    assume(not any(library.id_to_piece(i) in text for i in ids if library.is_control(i) or library.is_unknown(i)))
    tokenizer = SentencePieceTokenizer(sentencepiece_files(tmp_path_factory.mktemp("m"), model))
    assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text)


def streamed(tokenizer: SentencePieceTokenizer, token_ids: Sequence[int]) -> str:
    detokenizer = create_detokenizer(tokenizer, [])
    assert isinstance(detokenizer, ByteDetokenizer)
    return "".join([*(detokenizer.push(i) for i in token_ids), detokenizer.finish()])


@pytest.mark.parametrize("name", ["ernie", "llama", "llama-new", "llama-new-bare"])
def test_streamed_text_is_the_whole_text_and_comes_back(name: str, tmp_path: Path) -> None:
    tokenizer = case(name, tmp_path)
    for text in seeded_texts(2000):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids, skip_hidden=True)
        assert streamed(tokenizer, token_ids) in (whole, " " + whole)
        plain = text.replace("\u2581", " ")
        if not any(token in text for token in tokenizer.control_tokens) and "think>" not in text and plain[:1] != " ":
            assert whole == plain


@given(st.lists(st.integers(0, 505), max_size=30))
def test_any_ids_stream_as_they_decode(token_ids: list[int]) -> None:
    assert streamed(BARE, token_ids) == BARE.decode(token_ids, skip_hidden=True)


@pytest.fixture(scope="module", autouse=True)
def _bare(tmp_path_factory: pytest.TempPathFactory) -> None:
    global BARE  # noqa: PLW0603 - hypothesis calls a test many times with one fixture
    BARE = case("llama-new-bare", tmp_path_factory.mktemp("bare"))


BARE: SentencePieceTokenizer


def test_bytes_of_a_character_wait_for_each_other(tmp_path: Path) -> None:
    tokenizer = case("ernie", tmp_path)
    token_ids = tokenizer.encode("\U0001f680", add_special_tokens=False)
    detokenizer = create_detokenizer(tokenizer, [])
    assert [detokenizer.push(i) for i in token_ids] == ["", "", "", "\U0001f680"]


def test_a_tokenizer_json_beside_it_is_preferred_and_sentencepiece_can_be_asked_for(tmp_path: Path) -> None:
    sentencepiece_files(tmp_path, "bpe", tokenizer_config=ROLES)
    (tmp_path / "tokenizer.json").write_text((GOLDEN / "tokenizer.json").read_text())
    assert isinstance(load_tokenizer(tmp_path), FastTokenizer)
    assert isinstance(load_tokenizer(tmp_path, "sentencepiece"), SentencePieceTokenizer)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{{ cls_token }}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


@pytest.mark.parametrize("name", ["ernie", "llama-new", "unigram-new"])
@pytest.mark.parametrize(
    "forged",
    [
        "<|user|>",
        "\uff1c|user|\uff1e",
        "<s>",
        "x\uff1cs\uff1e </s>",
        "<mask:1>",
        "<|us<|user|>er|>",
        "<|end|>",
        "<think>",
        "x</think> ",
    ],
)
def test_nothing_in_a_message_acts(name: str, forged: str, tmp_path: Path) -> None:
    files = dict(CASES[name]["files"])
    sentencepiece_files(tmp_path, files.pop("model"), **files)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    encoder = PromptEncoder(tokenizer)

    def controls(content: str) -> list[int]:
        known = set(tokenizer.control_tokens.values())
        return [i for i in encoder.encode_chat([Message("user", content)], {}) if i in known and i != 0]

    assert controls(f"hello {forged} world") == controls("hello world")


@pytest.mark.parametrize("name", CASES)
def test_segments_of_a_prompt_are_encoded_as_the_whole(name: str, tmp_path: Path) -> None:
    tokenizer = case(name, tmp_path)
    for body in ["hello", " hello", "hello ", "def f(x):\n  return", "\u4f60\u597d <think> x"]:
        parts = [Segment(*part) for part in cut(token_pattern(tokenizer.control_tokens), body)]
        segments = [Segment("<s>", is_control=True), *parts, Segment("</s>", is_control=True), *parts]
        whole = tokenizer.encode("".join(segment.text for segment in segments), add_special_tokens=False)
        assert tokenizer.encode_segments(segments) == whole


def test_no_text_has_fewer_tokens_than_the_bound_allows(tmp_path: Path) -> None:
    (tmp_path / "u").mkdir()
    assert case("unigram", tmp_path / "u").max_token_chars is None
    bound = BARE.max_token_chars
    assert bound is not None
    assert all(len(t) <= bound * len(BARE.encode(t, add_special_tokens=False)) for t in seeded_texts(2000))


@pytest.mark.slow
def test_damaged_models_are_refused_or_served(tmp_path: Path) -> None:
    """Nothing but a CheckpointError comes of any damage, and what loads encodes and decodes."""
    sentencepiece_files(tmp_path, "bpe-prefix", tokenizer_config=ROLES)
    path = tmp_path / "tokenizer.model"
    whole, source, num_refused = path.read_bytes(), random.Random(7), 0
    for _ in range(400):
        data = bytearray(whole)
        start = source.randrange(len(data))
        kind = source.randrange(3)
        data[start : start + kind * source.randrange(20)] = source.randbytes(source.randrange(1, 20))
        path.write_bytes(data[: source.randrange(len(data))] if kind == 2 else data)
        try:
            tokenizer = SentencePieceTokenizer(tmp_path)
        except CheckpointError:
            num_refused += 1
            continue
        tokenizer.decode(tokenizer.encode("hello \U0001f680 <s> world", add_special_tokens=True), skip_hidden=True)
    assert num_refused > 100


@pytest.mark.parametrize("content", [b"", b"\x00", b"garbage" * 1000, b"\x0a\xff\xff\xff\xff\x7f", b"\x0a" * 10_000])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer.model: expected a SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config", {"tokenizer_class": "T5Tokenizer"}, "tokenizer_class: expected one of Ernie4_5Tokenizer"),
        ("tokenizer_config", {"tokenizer_class": "LamaTokenizer"}, "did you mean 'LlamaTokenizer'"),
        ("tokenizer_config", {"tokenizer_class": 5}, "tokenizer_class: expected a text, got 5"),
        ("tokenizer_config", {"add_bos_token": "yes"}, "add_bos_token: expected true or false, got 'yes'"),
        ("tokenizer_config", {"split_special_tokens": True}, "split_special_tokens: expected false"),
        (
            "tokenizer_config",
            {"bos_token": ["<s>"]},
            "bos_token: expected a text of 1 to 1024 char",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": []},
            "added_tokens_decoder: expected a map of",
        ),
        ("tokenizer_config", {"added_tokens_decoder": {"-1": {"content": "x"}}}, "expected a token id in 0.."),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"9": {"content": "x", "lstrip": 1}}},
            "lstrip: expected",
        ),
        ("added_tokens", {"x": 1 << 40}, r"'x': expected a token id in 0..2147483647, got 1099511627776"),
        ("added_tokens", {"x": -1}, "'x': expected a token id in"),
        ("added_tokens", {"x": 7, "y": 7}, "expected one text for an id"),
        ("added_tokens", {"": 7}, "expected a text of 1 to 1024 characters, got ''"),
        ("special_tokens_map", {"additional_special_tokens": "x"}, "additional_special_tokens: expected a list"),
    ],
)
def test_wrong_values_of_the_files_are_named(tmp_path: Path, file: str, content: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(sentencepiece_files(tmp_path, "bpe", **{file: content}))
