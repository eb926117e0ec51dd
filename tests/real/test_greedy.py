"""Greedy answers of trained models equal those of an independent float32 computation."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.cli import main
from tests.real.conftest import RealModel

OPTIONS: dict[str, dict[str, Any]] = {"the file's integers": {}, "bfloat16": {"quantization": "none"}}
# A text may part from the reference only where two tokens are as good: the gap between its two largest logits there, at
# most. Integer activations move logits more than bfloat16 does. Where a text parts depends on the instruction set.
MAX_GAPS: dict[str, dict[str, float]] = {
    "the file's integers": {
        "smollm2-135m": 0.65, "gemma3-270m": 0.3, "qwen2.5-coder-0.5b": 0.15, "qwen2.5-coder-1.5b": 0.1,
    },
    "bfloat16": {
        "smollm2-135m": 0.08, "gemma3-270m": 0.08, "qwen2.5-coder-0.5b": 0.05, "qwen2.5-coder-1.5b": 0.05,
    },
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
    assert [gap for _, _, gap in partings if gap > MAX_GAPS[weights][real_model.name]] == [], partings


def test_drafts_change_no_bit(real_model: RealModel, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--model", str(real_model.path), "--quick", "--requests", "8", "--prompt-tokens", "80"]
    assert main([*arguments, "--output-tokens", "24"]) == 0, capsys.readouterr().out
