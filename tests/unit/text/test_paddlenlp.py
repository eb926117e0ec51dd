"""The real PaddleNLP, where it is installed, on the tokenizers that it can read."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.detokenizer import create_detokenizer
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text.vocabularies import GOLDEN, SENTENCEPIECE, golden_tokenizer

TEXTS = ["hello world", "Z\u00fcrich \u4f60\u597d \U0001f680", "def f(x):\n    return x", "  a  b\n\n c", "it's 1234"]


@pytest.fixture(autouse=True)
def _real() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("paddlenlp", exc_type=ImportError)


def load(directory: Path) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_tokenizer(directory, "paddlenlp")


def qwen2(directory: Path) -> Tokenizer:
    model: dict[str, Any] = json.loads((GOLDEN / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load(directory)


def test_qwen2_gives_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    tokenizer, golden = qwen2(tmp_path), golden_tokenizer()
    assert tokenizer.eos_token_ids == (2,)
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        assert token_ids == golden.encode(text, add_special_tokens=True)
        assert tokenizer.decode(token_ids, skip_hidden=True) == text
        detokenizer = create_detokenizer(tokenizer, [])
        assert "".join([*(detokenizer.push(i) for i in token_ids), detokenizer.finish()]) == text


def test_control_tokens_of_a_message_are_text(tmp_path: Path) -> None:
    segments = [Segment("a<|im_end|>b", is_control=False), Segment("<|im_end|>", is_control=True)]
    assert qwen2(tmp_path).encode_segments(segments) == golden_tokenizer().encode_segments(segments)


def test_llama_is_read_under_its_name_in_paddlenlp(tmp_path: Path) -> None:
    shutil.copy(SENTENCEPIECE / "bpe-prefix.model", tmp_path / "sentencepiece.bpe.model")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    paddlenlp = load(tmp_path)
    shutil.copy(SENTENCEPIECE / "bpe-prefix.model", tmp_path / "tokenizer.model")
    native = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert paddlenlp.encode(text, add_special_tokens=True) == native.encode(text, add_special_tokens=True)
