"""What a quantised output head costs the demo model, in nats per token of text that people wrote."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer

from fastdeploy_sd.config import DEMO_MODEL, ModelConfig, QuantizationFormats
from fastdeploy_sd.config.quantization import WeightFormat
from fastdeploy_sd.types import I32
from tests.models.harness import SingleSequence

PATH = ModelConfig(DEMO_MODEL).path


@pytest.fixture(scope="module")
def texts() -> list[I32]:
    """Pieces of source code."""
    tokenizer, source = Tokenizer.from_file(str(PATH / "tokenizer.json")), inspect.getsource(textwrap)
    return [np.array(tokenizer.encode(source[i : i + 2000]).ids, np.int32) for i in range(0, 12_000, 2000)]


def loss(head: WeightFormat, texts: Sequence[I32]) -> float:
    """Mean of -log p of every token after the first of its text, under bfloat16 layers."""
    model = SingleSequence(PATH, "bfloat16", QuantizationFormats(dense="none", moe="none", lm_head=head))
    losses = []
    for text in texts:
        logits = model.logits(text)[:-1].astype(np.float64)
        peak = logits.max(-1)
        log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
        losses.append(log_sum - logits[np.arange(len(logits)), text[1:]])
    return float(np.concatenate(losses).mean())


def test_eight_bits_are_as_good_as_none_and_four_cost_little(texts: Sequence[I32]) -> None:
    """Little of about 3 nats; not nothing, as a head that is not quantised would cost."""
    exact = loss("none", texts)
    assert abs(loss("wint8", texts) - exact) < 0.003
    assert 0.003 < loss("wint4", texts) - exact < 0.03
