"""The bundled model is complete and has learnt something."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.tokenizer import load_tokenizer
from tests.models.harness import SingleSequence

pytestmark = pytest.mark.slow

PATH = ModelConfig(model=DEMO_MODEL).path
CODE = "import os\nimport sys\n\n\ndef main():\n    if len(sys.argv) != 2:\n        return 1\n    return 0\n"


def test_it_knows_python_better_than_chance() -> None:
    """Chance is ln(4096) = 8.3 nats per token."""
    token_ids = np.array(
        load_tokenizer(PATH, "tokenizers").encode_segments([Segment(CODE, is_control=False)]), np.int32
    )
    logits = SingleSequence(PATH, "bfloat16").logits(token_ids)[:-1].astype(np.float64)
    log_total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    loss = log_total - logits[np.arange(len(logits)), token_ids[1:]]
    assert loss.mean() < 4.0


def test_it_answers_a_chat_and_ends_its_turn() -> None:
    with LLM(model=DEMO_MODEL) as llm:
        tasks = [f"Complete this function:\ndef {name}(self):\n" for name in "abcdefgh"]
        prompts = [[{"role": "user", "content": task}] for task in tasks]
        answers = llm.chat(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=200))
    assert all(answer.outputs[0].text.strip() for answer in answers)
    assert any(answer.outputs[0].finish_reason == "stop" for answer in answers)


def test_its_mtp_layer_has_the_names_and_shapes_of_ernies() -> None:
    mtp = Checkpoint(PATH / "mtp")
    config = read_decoder_config(Checkpoint(PATH).config)
    hidden = config.hidden_size
    block = "ernie.mtp_block.0"
    for name, shape in (
        ("ernie.mtp_emb_norm.0.weight", (hidden,)),
        ("ernie.mtp_hidden_norm.0.weight", (hidden,)),
        ("ernie.mtp_linear_proj.0.weight", (hidden, 2 * hidden)),
        (f"{block}.input_layernorm.weight", (hidden,)),
        (f"{block}.self_attn.q_proj.weight", (config.attentions[0].q_size, hidden)),
        (f"{block}.mlp.down_proj.weight", (hidden, config.dense.intermediate_size)),
    ):
        weight = mtp.tensor(name, shape)
        assert np.isfinite(weight.view(np.uint16).astype(np.float32)).all()
        assert weight.any()
