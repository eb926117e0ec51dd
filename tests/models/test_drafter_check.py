"""`fastdeploy-sd drafter check` finds the reading of an EAGLE head that drafts best, and writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.cli import main
from fastdeploy_sd.models.checkpoint import Checkpoint, SafetensorsFile
from fastdeploy_sd.models.drafters.eagle_config import read_eagle3
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.text.tokenizer import load_tokenizer
from tests.models import rewrite
from tests.models.eagle_heads import EAGLE3, EagleHead, Head, normed, target_path

pytestmark = pytest.mark.slow

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


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mtp").mkdir()
    (tmp_path / "mtp" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert main(["drafter", "check", str(tmp_path / "mtp"), "--model", target_path(), "--output", str(tmp_path)]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
