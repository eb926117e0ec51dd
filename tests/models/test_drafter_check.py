"""`fastdeploy-sd drafter check` finds the reading of a drafter that drafts clearly best, and writes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import fastdeploy_sd
from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.cli import main
from fastdeploy_sd.cli.drafter_check import _Result, _standard_error
from fastdeploy_sd.models.checkpoint import Checkpoint, SafetensorsFile
from fastdeploy_sd.models.drafters.eagle_config import read_eagle3
from fastdeploy_sd.models.drafters.mtp_weights import HIDDEN_KEY, REFEED_KEY
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import DraftCounts
from fastdeploy_sd.worker.loading.drafter_readings import DrafterReadings, Reading
from tests.models import rewrite
from tests.models.eagle_heads import EAGLE3, EagleHead, Head, normed, target_path
from tests.models.mtp_models import make_model

pytestmark = pytest.mark.slow

DEMO = Path(fastdeploy_sd.__file__).parent / "demo_model"
TAPS = (1, 1, 2)
NUM_TOKENS = 12
TEXT = "".join(f"The {i}th line of a text is about {chr(97 + i % 26)}.\n" for i in range(60))


def knowing_head(
    folder: Path, prompts: list[list[int]], config: dict[str, object], mask_token: int | None = None
) -> Path:
    """A head whose output head was solved for the answers to these prompts, from rows that the layer leaves alone."""
    head = EagleHead(
        folder, Head("eagle3", TAPS, draft_vocab=4096, config=EAGLE3 | config, mask_token=mask_token), "llama-tiny"
    )
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: np.array(file.tensor(name)) for name in file.entries}
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name][...] = 0
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(target_path(), dtype="float32", speculative_config="naive") as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=sampling, use_tqdm=False)
    rows, wanted = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output.outputs[0].token_ids]
        hidden = head.hidden(np.array(text, np.int32))
        for i in range(len(prompt) - 1, len(text) - 2):
            rows.append(normed(hidden[i], tensors["norm.weight"]))
            wanted.append(np.eye(4096)[text[i + 2]])
    tensors["lm_head.weight"] = (np.linalg.pinv(np.array(rows)) @ np.array(wanted)).T.astype(np.float32)
    rewrite.write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


@pytest.mark.parametrize(("mask_token", "kind"), [(None, "an EAGLE-3 head"), (7, "a P-EAGLE head")])
def test_the_reading_that_fits_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mask_token: int | None, kind: str
) -> None:
    """The layers are named as if they were outputs."""
    config: dict[str, object] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [*TAPS]}}
    config |= {} if mask_token is None else {"mask_token_id": mask_token}
    verdict = f"Best: eagle_aux_hidden_state_layer_ids = {[*TAPS]}, and not as config.json says."
    ids = load_tokenizer(Path(target_path())).encode(TEXT, add_special_tokens=True)
    starts = np.linspace(0, len(ids) - 128, 4, dtype=int).tolist()
    folder = knowing_head(tmp_path / "head", [ids[start : start + 128] for start in starts], config, mask_token)
    (tmp_path / "text").write_text(TEXT)
    arguments = ["--model", target_path(), "--dtype", "float32", "--text", str(tmp_path / "text")]
    target = tmp_path / "written"
    arguments += ["--max-tokens", str(NUM_TOKENS), "--output", str(target)]
    assert main(["drafter", "check", str(folder), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert verdict in lines
    assert lines[0] == f"{folder}: {kind}, method eagle3"
    values = Checkpoint(Path(target_path())).config
    assert read_eagle3(Checkpoint(target), read_decoder_config(values, "")).reads == TAPS
    assert (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_rows_that_mtp_layers_read_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model's layer, whose config.json is made to say that all drafts of a step read the target's row."""
    folder = shutil.copytree(DEMO / "mtp", tmp_path / "mtp")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {REFEED_KEY: "target"}))
    arguments = ["--model", "demo", "--max-tokens", "256", "--output", str(tmp_path / "written")]
    assert main(["drafter", "check", str(folder), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: multi-token prediction (MTP) layers, method mtp"
    readings = [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:]
    assert readings == ["as config.json says", "mtp_hidden pre_norm", "mtp_refeed post_norm", "mtp_refeed pre_norm"]
    assert "Best: mtp_refeed = post_norm, and not as config.json says." in lines
    assert json.loads((tmp_path / "written" / "config.json").read_text())[REFEED_KEY] == "post_norm"


def test_layers_among_a_model_s_own_are_read_too(tmp_path: Path) -> None:
    path = make_model(tmp_path, "glm4_moe-tiny", "numbered").path
    readings = DrafterReadings(path, path)
    assert (readings.method, readings.as_is.values) == ("mtp", {HIDDEN_KEY: "post_norm", REFEED_KEY: "post_norm"})
    others = [other.values[REFEED_KEY] for other in readings.others(REFEED_KEY, readings.as_is.values)]
    assert others == ["pre_norm", "target"]


def test_a_lead_that_may_be_chance_does_not_count() -> None:
    """Twice the standard error of the difference; that of 100 steps of 0 or 1 right draft is 0.05 for each."""
    counts = DraftCounts(100, 150, (100,), (100,), (50,))
    error = _standard_error(counts)
    assert error == pytest.approx(0.05)
    results = [_Result(Reading("", {}), (), 1.5 + lead, error, 1.0, 1.0) for lead in (0.0, 0.13, 0.15)]
    assert [result.is_clearly_better(results[0]) for result in results] == [False, False, True]


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mtp").mkdir()
    (tmp_path / "mtp" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert main(["drafter", "check", str(tmp_path / "mtp"), "--model", target_path(), "--output", str(tmp_path)]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
