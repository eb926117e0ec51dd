"""`bench predictions`: what it predicts, and that a right prediction takes fewer steps."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.predictions import predictions_of
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from tests.models import golden


def test_every_24th_word_is_another() -> None:
    encoder = PromptEncoder(load_tokenizer(golden.ROOT / "qwen3-tiny"))
    answer = " ".join(f"word{i}" for i in range(60))
    kinds = predictions_of(encoder, answer, "", "something else")
    texts = [encoder.tokenizer.decode(token_ids.tolist(), skip_hidden=True) for token_ids in kinds.values()]
    assert texts[:2] == ["", answer]
    changed = [i for i, (a, b) in enumerate(zip(texts[2].split(), answer.split(), strict=True)) if a != b]
    assert changed == [23, 47]


def test_a_right_prediction_takes_fewer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    line = "predictions --workloads free-text --num-prompts 1 --repeats 1 --output-len 40 --num-threads 1 --json"
    assert main(line.split()) == 0
    rows = {row["prediction"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["plain"]["tokens_per_step"] == 1.0
    assert rows["the answer"]["tokens_per_step"] > 1.2 * rows["none"]["tokens_per_step"]
    assert rows["the answer"]["num_right"] > 10
    assert rows["none"]["num_predicted"] == 0
