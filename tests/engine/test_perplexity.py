"""`fastdeploy-sd perplexity` on the demo model: windows, intervals, and two formats next to each other."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli import WRONG_USAGE, main
from fastdeploy_sd.cli.perplexity.statistics import Estimate, kl_divergence, log_softmax
from fastdeploy_sd.cli.perplexity.windows import windows
from fastdeploy_sd.llm import LLM
from fastdeploy_sd.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

TEXT = "def add(a, b):\n    return a + b  # \u20ac\n\n\n" * 6


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def run(capsys: pytest.CaptureFixture[str], file: pathlib.Path, *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["perplexity", str(file), "--model", "demo", "--context", "32", "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("num_tokens", [32, 33, 47, 48, 100])
@pytest.mark.parametrize("stride", [1, 16, 31])
def test_windows_score_every_token_after_the_first_ones_once(num_tokens: int, stride: int) -> None:
    num_context = 32 - stride
    found = list(windows(num_tokens, 32, stride, num_context))
    assert [i for w in found for i in range(w.first, w.end)] == list(range(num_context, num_tokens))
    assert all(w.end - w.begin == 32 and w.first - w.begin >= num_context for w in found)


def test_an_estimate_is_a_mean_and_its_interval() -> None:
    found = Estimate.of(np.array([1.0, 2.0, 3.0, 4.0]))
    assert found.mean == 2.5
    assert found.margin == pytest.approx(1.96 * math.sqrt(5 / 3 / 4))


def test_divergence_follows_its_definition() -> None:
    p, q = np.array([[0.5, 0.25, 0.25, 0.0]]), np.array([[0.25, 0.5, 0.125, 0.125]])
    with np.errstate(divide="ignore"):
        logs = [log_softmax((np.log(probs) + 7).astype(np.float32)) for probs in (p, q)]
    assert np.exp(logs[0]) == pytest.approx(p, abs=1e-6)
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.25 * math.log(2)
    assert kl_divergence(*logs) == pytest.approx([expected], abs=1e-6)


def test_nats_are_those_of_the_same_prompts(file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a model against itself shows no difference."""
    found = run(capsys, file, "--against", "demo")
    with LLM("demo") as llm:
        token_ids = llm.generate(TEXT, SamplingParams(max_tokens=0), use_tqdm=False)[0].prompt_token_ids
        prompts = [token_ids[w.begin : w.end] for w in windows(len(token_ids), 32, 16, 16)]
        scored = [w.end - w.first for w in windows(len(token_ids), 32, 16, 16)]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    nats = [
        -best[token_id].logprob
        for output, count in zip(outputs, scored, strict=True)
        for token_id, best in zip(
            output.prompt_token_ids[-count:], (output.prompt_logprobs or [])[-count:], strict=True
        )
        if best is not None
    ]
    assert found["num_tokens"] == len(nats) == len(token_ids) - 16
    assert found["nats_per_token"]["mean"] == pytest.approx(np.mean(nats))
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(nats)))
    num_bytes = found["num_bytes"]
    assert 0 < len(TEXT.encode()) - num_bytes < len(TEXT.encode()) / 4
    assert found["nats_per_byte"]["mean"] == pytest.approx(sum(nats) / num_bytes)
    against = found["against"]
    assert against["kl_divergence"]["largest"] == against["difference"]["mean"] == 0.0
    assert against["same_top_token"]["mean"] == 1.0


def test_a_coarser_format_is_further_from_the_reference(file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    near, far = (
        run(capsys, file, "--quantization", name, "--against", "demo")["against"] for name in ("wint8", "wint4")
    )
    assert 0 < near["kl_divergence"]["mean"] < far["kl_divergence"]["mean"]
    assert near["kl_divergence"]["median"] <= near["kl_divergence"]["p99"] <= near["kl_divergence"]["largest"]
    assert near["nats_per_token"] == far["nats_per_token"], "the reference has its own weights"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--context", "4096"], "file: expected a text of at least 4096 tokens, got one of"),
        (["--context", "32", "--stride", "33"], "stride: expected 1..32 (context), got 33"),
        (["--context", "32", "--max-model-len", "32"], "context: expected at most 31 tokens for --model, got 32"),
    ],
)
def test_what_cannot_be_scored_is_said(
    file: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert main(["perplexity", str(file), "--model", "demo", *arguments]) == WRONG_USAGE
    assert text in capsys.readouterr().err


def test_a_file_that_is_no_text_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["perplexity", str(path), "--model", "demo"]) == WRONG_USAGE
    assert "file: expected a file with UTF-8 text" in capsys.readouterr().err
