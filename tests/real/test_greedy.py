"""Greedy answers of trained models equal those of an independent float32 computation."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.cli import main
from tests.real.conftest import RealModel

OPTIONS: dict[str, dict[str, Any]] = {"the file's integers": {}, "bfloat16": {"quantization": "none"}}
# (model, weights) -> where texts part from the reference: (text, token, gap between its two largest logits there).
PARTINGS: dict[tuple[str, str], list[tuple[int, int, float]]] = {
    ("smollm2-135m", "bfloat16"): [(7, 130, 0.06)],
    ("smollm2-135m", "the file's integers"): [
        (0, 57, 0.099), (1, 25, 0.039), (3, 8, 0.017), (4, 13, 0.024), (5, 39, 0.261), (6, 9, 0.318), (7, 36, 0.584),
    ],
    ("qwen2.5-coder-0.5b", "bfloat16"): [],
    ("qwen2.5-coder-0.5b", "the file's integers"): [(0, 5, 0.051), (1, 20, 0.051), (7, 8, 0.123)],
    ("gemma3-270m", "bfloat16"): [(3, 11, 0.027), (5, 27, 0.077), (6, 20, 0.036)],
    ("gemma3-270m", "the file's integers"): [
        (0, 50, 0.246), (1, 14, 0.064), (2, 79, 0.072), (3, 9, 0.16), (5, 2, 0.211), (6, 6, 0.262), (7, 1, 0.072),
    ],
}  # fmt: skip


@pytest.mark.parametrize("weights", OPTIONS)
def test_answers_are_those_of_float32_but_where_two_tokens_are_as_good(real_model: RealModel, weights: str) -> None:
    with LLM(model=str(real_model.path), **OPTIONS[weights]) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=160)
        prompts = [text["prompt"] for text in real_model.texts]
        if real_model.is_chat:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(chats, sampling, use_tqdm=False)
        else:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
    partings = []
    for i, (text, output) in enumerate(zip(real_model.texts, outputs, strict=True)):
        assert list(output.prompt_token_ids) == text["prompt_ids"]
        pairs = zip(text["token_ids"], output.outputs[0].token_ids, strict=False)
        at = next((j for j, (want, got) in enumerate(pairs) if want != got), None)
        if at is None:
            assert len(output.outputs[0].token_ids) == len(text["token_ids"])
        else:
            partings.append((i, at, text["gaps"][at]))
    assert partings == PARTINGS[real_model.name, weights]


def test_drafts_change_no_bit(real_model: RealModel, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--model", str(real_model.path), "--quick", "--requests", "8", "--prompt-tokens", "80"]
    assert main([*arguments, "--output-tokens", "24"]) == 0, capsys.readouterr().out
