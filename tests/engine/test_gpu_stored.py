"""Integers with a scale per group on a GPU: the numbers of the files, and the same bytes in every batch."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, run_alone, run_cell, standard_methods
from fastdeploy_sd.config import Config
from fastdeploy_sd.hub import located
from fastdeploy_sd.sampling_params import SamplingParams
from tests.engine.gpu import BATCH, TIGHT, short_requests, small_model, tiny_config
from tests.models import gguf_files, quantized_files, rewrite

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("kind")]

# With minima and without, of 4, 5 and 8 bits; an embedding of integers, which is the head too where it is tied.
TYPES = {"attn_v": "Q8_0", "attn": "Q5_0", "ffn_down": "Q5_1", "ffn": "Q4_1", "token": "Q8_0"}


def gguf_file(model: str) -> Callable[[pathlib.Path], pathlib.Path]:
    def write(folder: pathlib.Path) -> pathlib.Path:
        small = small_model(folder / "small", model)
        return gguf_files.write(folder / "model.gguf", str(small), TYPES)

    return write


def awq(folder: pathlib.Path) -> pathlib.Path:
    """With experts."""
    return rewrite.cut(quantized_files.write(folder, "qwen3_moe-tiny", quantized_files.awq(32))[0], 1, 1024)


# Windows; biases, and few blocks; experts.
CELLS: Mapping[str, tuple[Callable[[pathlib.Path], pathlib.Path], EngineVariant, str]] = {
    "gemma3": (gguf_file("gemma3-tiny"), BATCH, "naive"),
    "qwen2": (gguf_file("qwen2-tiny"), replace(TIGHT, must_preempt=False, must_hit=False), "ngram"),
    "awq": (awq, BATCH, "naive"),
}


def prompt_logprobs(config: Config) -> np.ndarray:
    """Return those of one request, where activations are as exact as int8 is."""
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = replace(short_requests()[0], sampling=sampling, grammar="", max_tokens=1)
    [answer] = run_alone(replace(config, model=replace(config.model, dtype="float32")), [request]).values()
    return np.array([own.logprob for own in answer.prompt_logprobs])


@pytest.mark.parametrize("model", CELLS)
def test_a_gpu_has_the_files_numbers(model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of prompts are a CPU's, and no answer depends on its batch or on drafts."""
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))
    write, way, name = CELLS[model]
    config = located(tiny_config(write(tmp_path)))
    want = prompt_logprobs(replace(config, device="cpu"))
    np.testing.assert_allclose(prompt_logprobs(config), want, atol=0.02)
    requests = [replace(r, max_tokens=4) for r in short_requests()[:3]]
    [method] = [PLAIN] if name == "naive" else standard_methods([name], [3])
    cell = run_cell(config, way, method, requests, run_alone(config, requests))
    assert (cell.difference, cell.missing) == (None, None)
