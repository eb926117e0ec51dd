"""`fastdeploy-sd quantize`: its folder gives the tokens of `--quantization`, and stores what it would make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.cli import main
from fastdeploy_sd.models.checkpoint import Checkpoint
from tests.models import gguf_files, golden, rewrite

pytestmark = pytest.mark.slow


def quantize(name: str, target: Path, fmt: str) -> int:
    return main(["quantize", str(golden.ROOT / name), str(target), "--format", fmt])


def answers(model: Path, quantization: str | None = None) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    with LLM(
        model=str(model), quantization=quantization, num_gpu_blocks_override=64, speculative_config="naive"
    ) as llm:
        outputs = llm.generate(prompt_token_ids=[[5, 6, 7, 8], [100, 200, 300]], sampling_params=params)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


# Sums cut within groups of 128; experts, and Paddle's names and order.
@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("qwen2-tiny", "wint4"),
        ("ernie4_5_moe-tiny", "wint4"),
        ("deepseek_v3-tiny", "wint4"),
        ("qwen3_next-tiny", "wint4"),
    ],
)
def test_the_folder_gives_the_tokens_of_the_option(name: str, fmt: str, tmp_path: Path) -> None:
    target = tmp_path / "quantized"
    assert quantize(name, target, fmt) == 0
    assert answers(target) == answers(golden.ROOT / name, fmt)
    types = {info.dtype for tensor, info in Checkpoint(target).tensors.items() if tensor.endswith("_packed")}
    assert types == {"I32"}
    groups = json.loads((target / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}  # the head has eight


@pytest.mark.parametrize("model", ["qwen3_5_moe-tiny", "gpt_oss-tiny"])
def test_stacked_experts_are_all_in_the_folder(model: str, tmp_path: Path) -> None:
    """One stack has many weights; gpt-oss's are stacked as they are."""
    source, target = rewrite.write_folder(tmp_path / "stacked", model), tmp_path / "quantized"
    tensors = rewrite.read(model)
    stacked = tensors if "gpt_oss" in model else rewrite.stack_experts(tensors)
    rewrite.write_file(source / "model.safetensors", stacked, {"format": "pt"}, "U8")
    assert main(["quantize", str(source), str(target), "--format", "wint4"]) == 0
    assert answers(target) == answers(source, "wint4")


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3_5-tiny"])
def test_integers_of_a_gguf_file_become_those_of_the_option(name: str, tmp_path: Path) -> None:
    """Those of an embedding become bfloat16, as layers read them; rows and columns of heads are in order."""
    types = {"conv1d": "F32", "": "Q8_0"}
    model, target = gguf_files.write(tmp_path / "m.gguf", name, types), tmp_path / "quantized"
    assert main(["quantize", str(model), str(target), "--format", "wint8"]) == 0
    assert Checkpoint(target).tensors["model.embed_tokens.weight"].dtype == "BF16"
    assert answers(target) == answers(model, "wint8")


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize("qwen2-tiny", tmp_path, "wint8") == 2
    assert "target: expected a folder that does not exist yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert quantize("qwen2-tiny", tmp_path / "new", "wint8") == 2
    assert "target: expected room for" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_failure_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(shutil, "copyfile", fails)
    assert quantize("qwen2-tiny", tmp_path / "new", "wint8") == 2
    assert not (tmp_path / "new").exists()
