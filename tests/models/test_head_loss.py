"""What a quantised output head makes of the demo model's distributions, against the same model with the exact head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from fastdeploy_sd.config import DEMO_MODEL, ModelConfig, QuantizationFormats
from fastdeploy_sd.config.quantization import WeightFormat
from tests.models.harness import SingleSequence

pytestmark = pytest.mark.slow

PATH = ModelConfig(DEMO_MODEL).path
TEXT = Path(__file__).parent / "texts" / "ferry.txt"
CHARS = 2000


def log_probabilities(head: WeightFormat) -> npt.NDArray[np.float64]:
    """f64[tokens, V] after every token of the text, which is cut to the model's context, under bfloat16 layers."""
    tokenizer, text = Tokenizer.from_file(str(PATH / "tokenizer.json")), TEXT.read_text()
    model = SingleSequence(PATH, "bfloat16", QuantizationFormats(dense="none", moe="none", lm_head=head))
    rows = []
    for begin in range(0, len(text), CHARS):
        ids = np.array(tokenizer.encode(text[begin : begin + CHARS]).ids, np.int32)
        logits = model.logits(ids).astype(np.float64)
        rows.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def exact() -> npt.NDArray[np.float64]:
    return log_probabilities("none")


@pytest.mark.parametrize(("head", "least", "most"), [("wint8", 4e-5, 1e-4), ("wint4", 2e-3, 6e-3)])
def test_eight_bits_cost_next_to_nothing_and_four_little(
    head: WeightFormat, least: float, most: float, exact: npt.NDArray[np.float64]
) -> None:
    """Nats per token by the exact model's own odds (measured: 6.5e-5 and 3.9e-3), of about 4 that the text takes.

    Not nothing, as a head that was not quantised would cost.
    """
    divergence = (np.exp(exact) * (exact - log_probabilities(head))).sum(-1)
    assert least < divergence.mean() < most
