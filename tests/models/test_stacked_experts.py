"""gpt-oss's experts in MXFP4: the numbers are those that the blocks say, and the model is that of these numbers."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.hub.gguf import checkpoint_folder
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.gguf.container import GgufFile
from fastdeploy_sd.models.weights.storages.registry import read_weight
from tests.models import gguf_files, rewrite
from tests.models.harness import SingleSequence
from tests.models.numpy_decoder import NumpyDecoder

pytestmark = pytest.mark.slow

NAME = "gpt_oss-tiny"
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def write(folder: pathlib.Path, exponent: int | None = None) -> dict[str, np.ndarray]:
    """Write the golden model with random blocks; return the numbers f32[E, out, in] of each stack."""
    rng, tensors = np.random.default_rng(0), rewrite.read(NAME)
    numbers: dict[str, np.ndarray] = {}
    bytes_of: dict[str, np.ndarray] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outer, inner // 32, 16), np.uint8)
        scales = rng.integers(118, 122, blocks.shape[:3], np.uint8)
        values = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
        values = values.reshape(*blocks.shape[:3], 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
        numbers[name] = values.reshape(experts, outer, inner)
        if exponent is not None:
            scales[1, 3] = exponent
        bytes_of |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    rewrite.write_folder(folder, NAME, {"quantization_config": MXFP4})
    rewrite.write_file(folder / "model.safetensors", tensors | bytes_of, {"format": "pt"}, byte_type="U8")
    return numbers


def test_blocks_are_the_numbers_that_they_say(tmp_path: pathlib.Path) -> None:
    numbers = write(tmp_path / "m")
    source = Checkpoint(tmp_path / "m")
    for stack, values in numbers.items():
        prefix, role = stack.rsplit(".", 1)
        for e in (0, 5):
            parts = {"down_proj": values[e]}
            if role == "gate_up_proj":
                parts = {"gate_proj": values[e, ::2], "up_proj": values[e, 1::2]}
            for part, want in parts.items():
                weight = read_weight(source, f"{prefix}.{e}.{part}", (want.shape[0], want.shape[1]))
                np.testing.assert_array_equal(weight.numbers().data, want)
                cut = weight.rows(3, 40).columns(32, 96)
                np.testing.assert_array_equal(cut.numbers().data, want[3:40, 32:96])


def test_the_model_is_that_of_the_numbers(tmp_path: pathlib.Path) -> None:
    """Products of MXFP4 differ from those of its numbers by int8 inputs alone; drafts change no token."""
    write(tmp_path / "m")
    token_ids = np.random.default_rng(0).integers(4, 4096, 40).astype(np.int32)
    want = NumpyDecoder(tmp_path / "m", "float32", "float32").logits(token_ids)
    numbers = SingleSequence(tmp_path / "m", "float32", keeps_integers=False).logits(token_ids)
    np.testing.assert_allclose(numbers, want, atol=2e-3)
    own = SingleSequence(tmp_path / "m", "float32", keeps_integers=True).logits(token_ids)
    assert np.linalg.norm(own - want) < 0.1 * np.linalg.norm(want)
    answers = []
    for method in ("naive", {"method": "ngram"}):
        with LLM(str(tmp_path / "m"), num_gpu_blocks_override=64, speculative_config=method) as llm:
            outputs = llm.generate(
                prompt_token_ids=[[*range(9, 29)] * 4, [7, 8]], sampling_params=SamplingParams(temperature=0.0)
            )
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_gguf_file_of_the_blocks_is_the_same_model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' biases, sinks and the router have other names there; the blocks have other neighbours in a byte."""
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))
    write(tmp_path / "m")
    file = gguf_files.write(tmp_path / "m.gguf", str(tmp_path / "m"), "F32")
    folder = checkpoint_folder([file])
    assert {entry.dtype for name, entry in GgufFile(file).entries.items() if "exps.weight" in name} == {"MXFP4"}
    token_ids = np.random.default_rng(0).integers(4, 4096, 200).astype(np.int32)
    own, want = (SingleSequence(path, "float32", keeps_integers=True) for path in (folder, tmp_path / "m"))
    np.testing.assert_array_equal(own.logits(token_ids), want.logits(token_ids))
    answers = []
    for model in (file, tmp_path / "m"):
        with LLM(str(model), num_gpu_blocks_override=64) as llm:
            outputs = llm.generate(
                prompt_token_ids=[[*range(9, 29)] * 8, [7, 8]], sampling_params=SamplingParams(temperature=0.0)
            )
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_scale_that_is_no_number_is_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "m", exponent=255)
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scales: expected exponents below 255"):
        SingleSequence(tmp_path / "m", "float32")
