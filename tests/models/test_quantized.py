"""wint8, wint4 and mixed models against the NumPy meaning of the same quantised model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.config import QuantizationFormats
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.quant_scheme import QuantScheme
from tests.models import golden
from tests.models.harness import SingleSequence
from tests.models.numpy_decoder import NumpyDecoder

pytestmark = pytest.mark.slow

NUM_STEPS = 24


# Every format of every kind of layer, somewhere.
CASES = [
    *itertools.product(
        (*golden.FIRST, "glm4_moe-tiny", "gpt_oss-tiny", "deepseek_v3-tiny", "qwen3_5-tiny", "qwen3_next-tiny"),
        ("wint8", "wint4"),
    ),
    ("ernie4_5_moe-tiny", QuantizationFormats(dense="wint8", moe="wint4", lm_head="none")),
    ("qwen3_moe-tiny", QuantizationFormats(dense="none", moe="wint8", lm_head="wint4")),
    ("qwen3-tiny", QuantizationFormats(dense="wint4", moe="none", lm_head="wint4")),
    ("llama-tiny", QuantizationFormats(dense="wint4", moe="none", lm_head="none")),
]


def reference(name: str, quantization: str | QuantizationFormats) -> NumpyDecoder:
    scheme = QuantScheme.create("float32", quantization)  # type: ignore[arg-type]
    return NumpyDecoder(name, scheme.linear, scheme.lm_head, scheme.experts)


def test_a_format_of_experts_needs_experts() -> None:
    formats = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
    with pytest.raises(
        ConfigError, match=r"quantization\.moe_quant_type: expected none or the dense_quant_type \(wint8\), as"
    ):
        LLM(model=str(golden.ROOT / "llama-tiny"), quantization=formats)


def test_the_numpy_decoder_is_right_without_quantisation() -> None:
    """Otherwise agreement below would mean nothing."""
    for name in golden.NAMES:
        model = NumpyDecoder(name, "float32", "float32")
        for case in golden.cases(name)[:4]:
            np.testing.assert_allclose(model.logits(case.prompt)[-1], case.logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("name", "quantization"), CASES, ids=str)
def test_logits_match(name: str, quantization: str | QuantizationFormats) -> None:
    """Rows agree to float32 rounding until an activation that differs in its last bit rounds to the next int8 value.

    That is rare, but such a row differs by a visible step (more where it changes an expert's choice), and so do the
    later rows that attend to it.
    """
    model, want = SingleSequence(name, "float32", quantization), reference(name, quantization)
    errors = []
    for case in golden.cases(name):
        got, expected = model.logits(case.prompt), want.logits(case.prompt)
        errors += (np.abs(got - expected).max(-1) / expected.std()).tolist()
    assert np.mean(np.array(errors) < 1e-4) > 0.15
    assert np.mean(errors) < 0.2


@pytest.mark.parametrize(("name", "quantization"), CASES, ids=str)
def test_greedy_tokens_match(name: str, quantization: str | QuantizationFormats) -> None:
    """Every token the engine chose is the reference's choice, unless the reference is within an int8 step of a tie.

    Where such a step changes an expert's choice, one token in fifty may be further from it.
    """
    want, cases = reference(name, quantization), golden.cases(name)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
    with LLM(
        model=str(golden.ROOT / name), dtype="float32", quantization=quantization, num_gpu_blocks_override=64,
        speculative_config="naive",
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompt_token_ids=[c.prompt.tolist() for c in cases], sampling_params=params)
    num_same = num_far = 0
    for case, output in zip(cases, outputs, strict=True):
        tokens = np.array(output.outputs[0].token_ids)
        logits = want.logits(np.concatenate([case.prompt, tokens[:-1]]))[len(case.prompt) - 1 :]
        loss = logits.max(-1) - logits[np.arange(NUM_STEPS), tokens]
        num_far += int((loss >= 0.5 * logits.std()).sum())
        num_same += int((loss == 0).sum())
    assert num_far <= (NUM_STEPS * len(cases) // 50 if golden.has_experts(name) else 0)
    assert num_same > 0.9 * NUM_STEPS * len(cases)
