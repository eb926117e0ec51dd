"""Ids that a checkpoint's files know and its model cannot produce: bad words and EOS ids beyond the vocabulary."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_sd.llm import LLM
from fastdeploy_sd.sampling_params import SamplingParams
from tests.models import golden

pytestmark = pytest.mark.slow

NAME = "llama-tiny"
VOCAB = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden model whose tokenizer has one token more than its vocabulary, and which names such a token as an EOS."""
    folder = tmp_path_factory.mktemp("foreign") / NAME
    shutil.copytree(golden.ROOT / NAME, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pad = {"content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append({"id": VOCAB, "special": True, **pad})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, VOCAB + 5]}))
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(model=str(checkpoint), kv_cache_memory_gb=0.01, speculative_config="naive") as made:
        assert made._tokenizer.encode("[PAD]", add_special_tokens=False) == [VOCAB]
        yield made


def test_a_bad_word_that_no_model_can_say_is_kept_out_by_itself(llm: LLM) -> None:
    [plain] = llm.generate("hello", SamplingParams(max_tokens=8, temperature=0))
    [output] = llm.generate("hello", SamplingParams(max_tokens=8, temperature=0, bad_words=("[PAD]",)))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    word = llm._tokenizer.decode(plain.outputs[0].token_ids[:1], skip_hidden=False)
    first, second = (
        llm.generate("hello", SamplingParams(max_tokens=8, temperature=0, bad_words=words))[0].outputs[0].token_ids
        for words in ((word,), ("[PAD]", word, word + "[PAD]"))
    )
    assert first == second, "the other words are forbidden as before"


def test_an_eos_that_no_model_can_say_ends_nothing(
    llm: LLM, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [output] = llm.generate("hello", SamplingParams(max_tokens=3, min_tokens=3, temperature=0))
    assert len(output.outputs[0].token_ids) == 3
    with (
        caplog.at_level(logging.WARNING),
        LLM(model=str(checkpoint), kv_cache_memory_gb=0.01, speculative_config="naive"),
    ):
        lines = [record.getMessage() for record in caplog.records if "EOS" in record.getMessage()]
    assert f"checkpoint: EOS ids beyond the vocabulary of {VOCAB} end nothing: [{VOCAB + 5}]" in lines
