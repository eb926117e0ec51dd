"""The demo model's trained MTP layer accepts through the engine exactly what a teacher-forced computation predicts."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from tokenizers import Tokenizer

from fastdeploy_sd.config import ModelConfig
from fastdeploy_sd.models.checkpoint import Checkpoint, SafetensorsFile
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.types import F32, I32, DraftCounts
from tests.models import rewrite
from tests.models.mtp_models import MtpParts, MtpReference
from tests.models.mtp_runs import make_engine, make_requests

pytestmark = pytest.mark.slow

DEMO = ModelConfig(model="demo").path
TEXT = pathlib.Path(__file__).parent / "texts" / "ferry.txt"
NUM_STEPS, MAX_TOKENS = 3, 60


def read_tensors(path: pathlib.Path) -> dict[str, F32]:
    file = SafetensorsFile(path)
    return {name: widen(file.tensor(name)) for name in file.entries}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MtpReference:
    """The weights as scripts/demo_model/train.py names them."""
    tensors = read_tensors(DEMO / "mtp" / "model.safetensors")
    block = "ernie.mtp_block.0."
    parts = MtpParts(
        embedding_norm=tensors["ernie.mtp_emb_norm.0.weight"],
        hidden_norm=tensors["ernie.mtp_hidden_norm.0.weight"],
        projection=tensors["ernie.mtp_linear_proj.0.weight"],
        block={name.removeprefix(block): value for name, value in tensors.items() if name.startswith(block)},
        output_norm=None,
        embedding=None,
        head=None,
    )
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": 1}
    blocks = tmp_path_factory.mktemp("blocks")
    (blocks / "config.json").write_text(json.dumps(config))
    shared = {n: v for n, v in read_tensors(DEMO / "model.safetensors").items() if ".layers." not in n}
    layer = {f"model.layers.0.{name}": value for name, value in parts.block.items()}
    rewrite.write_file(blocks / "model.safetensors", shared | layer, {"format": "pt"})
    assert "num_hidden_layers" in Checkpoint(blocks).config
    return MtpReference(DEMO, blocks, [parts], config)


def prompts() -> list[I32]:
    """Two places of a program that the model was not trained on."""
    tokenizer, text = Tokenizer.from_file(str(DEMO / "tokenizer.json")), TEXT.read_text()
    return [np.array(tokenizer.encode(text[begin : begin + 400]).ids, np.int32) for begin in (0, 3000)]


@dataclass
class Prediction:
    """What verification would count, by position of the draft."""

    drafted: list[int] = field(default_factory=lambda: [0] * NUM_STEPS)
    reached: list[int] = field(default_factory=lambda: [0] * NUM_STEPS)
    accepted: list[int] = field(default_factory=lambda: [0] * NUM_STEPS)

    def judge(self, drafts: list[int], truth: list[int]) -> int:
        """Count one step's drafts and return how many are accepted."""
        num_right = 0
        for i, draft in enumerate(drafts):
            self.drafted[i] += 1
            self.reached[i] += num_right == i
            self.accepted[i] += num_right == i and draft == truth[i]
            num_right += num_right == i and draft == truth[i]
        return num_right


def predict(reference: MtpReference, text: I32, num_prompt_tokens: int) -> Prediction:
    """Walk along a text that greedy decoding gave, as decoding with drafts would."""
    hidden, prediction = reference.hidden(text), Prediction()
    n = num_prompt_tokens + 1
    while n < len(text):
        count = min(NUM_STEPS, len(text) - n - 1)
        drafts = reference.drafts(text[:n], count, hidden[: n - 1]).token_ids.tolist()
        n += prediction.judge(drafts, text[n : n + count].tolist()) + 1
    return prediction


def test_acceptance_is_what_teacher_forcing_predicts(reference: MtpReference) -> None:
    engine, _ = make_engine("demo", NUM_STEPS, max_model_len=1024)
    todo, texts = make_requests(prompts(), MAX_TOKENS), {}
    counts: dict[str, DraftCounts] = {}
    for request in todo:
        engine.submit(request)
        texts[request.request_id] = request.prompt_token_ids.tolist()
    while engine.has_work():
        for output in engine.step():
            texts[output.request_id] += output.token_ids
            if output.metrics is not None:
                counts[output.request_id] = output.metrics.drafts
    total = Prediction()
    for request in todo:
        text, got = np.array(texts[request.request_id], np.int32), counts[request.request_id]
        want = predict(reference, text, len(request.prompt_token_ids))
        assert list(got.drafted) == want.drafted
        assert list(got.reached) == want.reached
        assert list(got.accepted) == want.accepted
        total.reached = [a + b for a, b in zip(total.reached, want.reached, strict=True)]
        total.accepted = [a + b for a, b in zip(total.accepted, want.accepted, strict=True)]
    # Half of the drafts at least, as after training: were engine and prediction wrong alike, there would be few.
    assert all(a > 0.5 * r for a, r in zip(total.accepted, total.reached, strict=True)), total
