"""scripts/gpu_check.sh, as far as that can be told without a GPU: what it serves is served on the emulated one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from benchmarks.shapes import SHAPES
from custom_ops import cuda_build
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from scripts import gpu_aims, gpu_check, served_answers, step_costs
from tests.engine.gpu import small_model

pytestmark = pytest.mark.slow

DEADLINE_S = 600  # against a hang: emulated kernels on a busy machine take minutes
# Starts a process that has its output, and waits for it.
HANGS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", child.pid, flush=True)
child.wait()
"""
# Answers every request with its argument, and says more than a pipe holds before.
TALKS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        print("x" * (1 << 20), file=sys.stderr, flush=True)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(sys.argv[1].encode())
    do_GET = do_POST
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"server: serving it at http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""


# Generates with names in place of Paddle.
WITHOUT_PADDLE = f"""
import sys; sys.path.insert(0, {str(served_answers.ROOT)!r})
from tests.engine.gpu import short_requests, tiny_config
from fastdeploy_sd.cli.verify import run_alone
from dataclasses import replace
import paddle
assert paddle.__version__ == "none"
[answer] = run_alone(replace(tiny_config(), device="DEVICE"), short_requests()[:1]).values()
assert len(answer.token_ids) == 6
"""


@pytest.mark.long
def test_a_server_answers_the_same_with_every_method(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    options = (
        "--model",
        str(small_model(tmp_path / "model", "llama-tiny")),
        "--device",
        "gpu",
        "--max-model-len",
        "128",
    )
    servers = [(method, (*options, *gpu_check.speculation(method))) for method in ("naive", "ngram")]
    figures = served_answers.serve_all(servers, DEADLINE_S, num_tokens=5)
    assert figures.keys() == {"naive", "ngram"}
    for found in figures.values():
        assert found["tokens_per_s"] > 0
        assert 0 < found["idle_share_of_8"] < 1


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check.main([]) == 2
    assert "gpu_check: expected a GPU that nvidia-smi lists, found none" in capsys.readouterr().err


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_stages_that_fail_or_take_too_long_are_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def raises(_: float) -> None:
        raise KeyError("choices")

    todo = (
        gpu_check.Stage("fails", 60, python("print('why'); raise SystemExit(3)")),
        gpu_check.Stage("hangs", 1, python(HANGS)),
        gpu_check.Stage("raises", 60, run=raises),
        gpu_check.Stage("skips", 60, python("print('10 skipped in 0.1s')"), expected=gpu_check.SOME_PASSED),
        gpu_check.Stage("tests", 60, python("print('1 passed, 9 skipped')"), expected=gpu_check.SOME_PASSED),
        gpu_check.Stage("sees the others", 60, python(f"print(open({str(tmp_path / 'found.json')!r}).read())")),
        gpu_check.Stage("of two", 60, python("raise SystemExit(1)"), num_gpus=2),
        gpu_check.Stage("says", 60, (*python("print('begins', '{}')"), "--json")),
        gpu_check.Stage("measures", 60, (*python("import sys; open(sys.argv[1], 'w').write('[7]')"), "{out}")),
    )
    monkeypatch.setattr(gpu_check, "stages", lambda: todo)
    monkeypatch.setattr(gpu_check, "refusal", lambda: None)
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 1
    findings = json.loads((tmp_path / "found.json").read_text())
    assert (findings["schema_version"], findings["num_gpus"]) == (gpu_check.SCHEMA_VERSION, 0)
    found = findings["stages"]
    assert {name: result["passed"] for name, result in found.items()} == {
        "fails": False, "hangs": False, "raises": False, "skips": False, "tests": True, "sees the others": True,
        "says": True, "measures": True,
    }  # fmt: skip
    assert "why" in found["fails"]["tail"]
    assert "KeyError: 'choices'" in found["raises"]["tail"]
    assert '"tests": {' in found["sees the others"]["tail"]
    assert (found["measures"]["figures"], found["says"]["figures"]) == ([7], {})
    assert "10 skipped" in found["skips"]["tail"]
    started = re.search(r"started (\d+)", found["hangs"]["tail"])
    assert started is not None
    assert not is_running(int(started[1]))


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_gpu_that_the_built_kernels_refuse_is_none_to_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = (gpu_check.Stage("build", 60, python("")), gpu_check.Stage("ops", 60, python("")))
    monkeypatch.setattr(gpu_check, "stages", lambda: todo)
    monkeypatch.setattr(gpu_check, "refusal", lambda: None)
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", "/nowhere/libfdsd_cuda.so")
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 2
    assert "gpu_check: no CUDA kernels at /nowhere" in capsys.readouterr().err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["stages"].keys() == {"build"}
    assert "/nowhere" in found["refusal"]


@pytest.mark.parametrize("code", ["import time; time.sleep(600)", "raise SystemExit('no model')"])
def test_a_server_that_does_not_start_is_cut(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(served_answers, "_SERVER", python(code))
    stage = gpu_check.Stage("served", 2, run=lambda limit_s: served_answers.serve_all([("any", ())], limit_s))
    result = gpu_check.result_of(stage, pathlib.Path(os.devnull))
    assert not result["passed"]
    assert "server: expected a line that says where it serves" in result["tail"]
    assert ("no model" in result["tail"]) == ("no model" in code)


@pytest.mark.parametrize(("answer", "error"), [('{"choices": [{"text": "a"}]}', None), ("{}", "KeyError: 'choices'")])
def test_what_a_server_says_is_read_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, answer: str, error: str | None
) -> None:
    monkeypatch.setattr(served_answers, "_SERVER", (*python(TALKS), answer))
    stage = gpu_check.Stage("served", DEADLINE_S, run=lambda limit_s: served_answers.serve_all([("any", ())], limit_s))
    result = gpu_check.result_of(stage, pathlib.Path(os.devnull))
    assert result["passed"] == (error is None), result["tail"]
    assert (error or "") in result["tail"]


def test_the_stages_take_less_than_ten_minutes() -> None:
    wanted = [stage for stage in gpu_check.stages() if gpu_check.is_wanted(stage, None, is_full=False)]
    assert sum(stage.limit_s for stage in wanted) < 600
    assert {"matrix"} == {stage.name for stage in gpu_check.stages()} - {stage.name for stage in wanted}


def test_every_test_for_a_gpu_is_in_a_stage() -> None:
    folders = [served_answers.ROOT / part for stage in gpu_check.stages() for part in stage.command if "tests/" in part]
    marked = [
        path for path in (served_answers.ROOT / "tests").rglob("*.py") if "pytest.mark." + "gpu" in path.read_text()
    ]
    assert len(marked) > 5
    assert [path for path in marked if not any(path.is_relative_to(folder) for folder in folders)] == []


def test_a_stage_of_tests_must_run_some() -> None:
    expected = {stage.name for stage in gpu_check.stages() if stage.expected == gpu_check.SOME_PASSED}
    assert expected == {"ops", "sanitizer", "engine", "splitwise", "matrix"}


def test_what_goes_from_gpu_to_gpu_is_checked_without_a_model_on_the_cpu() -> None:
    """Which Paddle would be needed for."""
    [command] = [stage.command for stage in gpu_check.stages() if stage.name == "splitwise"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # names, not a tree
    said = subprocess.check_output([*command, "--collect-only"], cwd=served_answers.ROOT, env=environment, text=True)
    found = re.findall(r"^tests/\S+::(\S+)", said, re.MULTILINE)
    assert found, said
    assert [name for name in found if "cpu" in name] == []


def test_what_is_aimed_at_is_beside_what_was_found() -> None:
    shape = "64:8 heads"
    times = {(64, 8, 4096): 90.0, (64, 8, 8192): 110.0, (64, 1, 8192): 100.0, (1, 8192, 8192): 9.0}
    timed = [
        cost("attention", f"{n} requests x {rows} rows, context {context}, {shape}", us, 0.7 + us / 1000, 0.65)
        for (n, rows, context), us in times.items()
    ]
    timed[1]["others_us"] = {"FlashInfer": 121.0}
    timed += [cost("sampling", "256 requests x 6 rows, greedy", 50.0, 0.5)]
    timed += [cost("linear", f"wint8 4096x4096, {rows} rows", 5.0, 0.85, 0.69) for rows in (1, 64, 2048)]
    steps = [
        {"rows": rows, "requests": requests, "context": context, "ms": ms}
        for rows, requests, context, ms in [(1, 1, 512, 0.6), (1, 1, 64, 0.5), (8, 1, 64, 0.55), (8, 8, 64, 0.7)]
    ]
    stages = {
        "ops": {"passed": True},
        "verify": {"passed": False},
        "kernel times": {"figures": {"rates": {"copy_gb_per_s": 3000.0}, "costs": timed}},
        "step times": {"figures": {"steps": steps}},
        "served": {
            "figures": {
                "naive": {"tokens_per_s": 100.0, "idle_share_of_8": 0.06},
                "auto": {"tokens_per_s": 99.0, "idle_share_of_8": 0.01},
            }
        },
    }
    found = gpu_aims.aims(stages)
    assert [(aim["bound"], aim["value"], aim["met"]) for aim in found] == [
        ("passed", True, True), ("passed", None, None), ("passed", None, None), ("passed", False, False),
        ("passed", None, None), (">= 0.8", 0.79, False), (">= 1.0", 1.1, True), ("<= 1.15", 1.1, True),
        ("<= 1.3", 2.0, False), (">= 0.6", 0.65, True), (">= 0.8", 0.85, True), (">= 0.7", 0.69, False),
        ("<= 1.4286", 1.2507, True), ("<= 1.4286", 1.6791, False), ("<= 1.15", 1.1, True), ("<= 0.05", 0.06, False),
        (">= 0.98", 0.99, True),
    ]  # fmt: skip
    assert {aim["met"] for aim in gpu_aims.aims({})} == {None}
    assert set(gpu_aims._SHOWN) <= {stage.name for stage in gpu_check.stages()}


def cost(kind: str, text: str, us: float, copy_share: float, matmul_share: float | None = None) -> dict[str, Any]:
    return {"kind": kind, "text": text, "us": us, "copy_share": copy_share, "matmul_share": matmul_share}


def test_the_aims_know_the_shape_that_steps_are_timed_with() -> None:
    shape = read_decoder_config(SHAPES["qwen3-0.6b"], "config.json")
    assert weight_bytes_per_step(shape, QuantScheme.create("bfloat16", None)) == gpu_aims.WEIGHT_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "ensure_checkpoint", raises_options)
        with pytest.raises(KeyError, match=r"--model.*qwen3-0\.6b"):
            step_costs.main(["out.json", "--device", "gpu"])


def raises_options(options: Sequence[str]) -> NoReturn:
    raise KeyError(*options)


def test_packages_that_are_missing_are_named_and_names_stand_in_for_paddle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With these a GPU runs a model; a CPU says what it lacks."""
    version, find_spec = importlib.metadata.version, importlib.util.find_spec

    def version_of(name: str) -> str:
        if name == "uvicorn":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "paddle" else find_spec(name))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    monkeypatch.setattr(gpu_check, "refusal", lambda: None)
    todo = [gpu_check.Stage(device, 120, python(WITHOUT_PADDLE.replace("DEVICE", device))) for device in ("gpu", "cpu")]
    monkeypatch.setattr(gpu_check, "stages", lambda: todo)
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 1
    assert "lacks paddlepaddle, uvicorn" in capsys.readouterr().out
    findings = json.loads((tmp_path / "found.json").read_text())
    assert findings["missing_packages"] == ["paddlepaddle", "uvicorn"]
    on_gpu, on_cpu = findings["stages"].values()
    assert on_gpu["passed"], on_gpu["tail"]
    assert not on_cpu["passed"]
    assert "expected Paddle for memory and operators of the host" in on_cpu["tail"]
