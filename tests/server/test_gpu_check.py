"""scripts/gpu_check.sh, as far as that can be told without a GPU: what it serves is served on the emulated one."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from custom_ops import cuda_build
from scripts import gpu_check
from tests.models import golden

DEADLINE_S = 120


def test_a_server_answers_the_same_with_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    options = ("--model", str(golden.ROOT / "llama-tiny"), "--device", "gpu", "--max-model-len", "128")
    rates = gpu_check.serve_all(options, DEADLINE_S, ("naive", "ngram"), num_tokens=5)
    assert rates.keys() == {"naive", "ngram"}


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check.main([]) == 2
    assert "gpu_check: expected a GPU that nvidia-smi lists, found none" in capsys.readouterr().err


def test_stages_that_fail_or_take_too_long_are_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def python(code: str) -> tuple[str, ...]:
        return sys.executable, "-c", code

    todo = (
        gpu_check.Stage("fails", 60, python("print('why'); raise SystemExit(3)")),
        gpu_check.Stage("hangs", 1, python("while True: pass")),
        gpu_check.Stage("measures", 60, (*python("import sys; open(sys.argv[1], 'w').write('[7]')"), "{out}")),
    )
    monkeypatch.setattr(gpu_check, "stages", lambda: todo)
    monkeypatch.setattr(gpu_check, "refusal", lambda: None)
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())["stages"]
    assert {name: result["passed"] for name, result in found.items()} == {
        "fails": False, "hangs": False, "measures": True,
    }  # fmt: skip
    assert "why" in found["fails"]["tail"]
    assert found["measures"]["figures"] == [7]


def test_the_stages_take_less_than_ten_minutes() -> None:
    assert sum(stage.limit_s for stage in gpu_check.stages()) < 600
