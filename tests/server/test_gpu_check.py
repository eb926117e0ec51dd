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
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from benchmarks.shapes import SHAPES
from custom_ops import cuda_build
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from scripts import gpu_aims, gpu_check, gpu_stages, served_answers, step_costs
from scripts.gpu_stages import Check, Scale
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
    servers = [(method, (*options, *gpu_stages.speculation(method))) for method in ("naive", "ngram")]
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
        Check(1, "fails", 60, python("print('why'); raise SystemExit(3)")),
        Check(1, "hangs", 1, python(HANGS)),
        Check(1, "raises", 60, run=raises),
        Check(1, "skips", 60, python("print('10 skipped in 0.1s')"), expected=gpu_stages.SOME_PASSED),
        Check(1, "tests", 60, python("print('1 passed, 9 skipped')"), expected=gpu_stages.SOME_PASSED),
        Check(1, "sees the others", 60, python(f"print(open({str(tmp_path / 'found.json')!r}).read())")),
        Check(1, "of two", 60, python("raise SystemExit(1)"), num_gpus=2),
        Check(1, "says", 60, (*python("print('begins', '{}')"), "--json")),
        Check(1, "measures", 60, (*python("import sys; open(sys.argv[1], 'w').write('[7]')"), "{out}")),
    )
    only(monkeypatch, todo)
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 1
    findings = json.loads((tmp_path / "found.json").read_text())
    assert (findings["schema_version"], findings["num_gpus"]) == (gpu_check.SCHEMA_VERSION, 0)
    found = findings["checks"]
    assert {name: result["passed"] for name, result in found.items()} == {
        "build": True, "fails": False, "hangs": False, "raises": False, "skips": False, "tests": True,
        "sees the others": True, "says": True, "measures": True,
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


def only(monkeypatch: pytest.MonkeyPatch, todo: Sequence[Check]) -> None:
    """Let these be all there is to check, on a machine with a GPU."""
    monkeypatch.setattr(gpu_check, "checks", lambda: todo)
    monkeypatch.setattr(gpu_check, "BUILD", Check(1, "build", 60, python("")))
    monkeypatch.setattr(gpu_check, "refusal", lambda: None)


def test_kernels_that_cannot_be_built_end_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, (Check(1, "ops", 60, python("")),))
    monkeypatch.setattr(gpu_check, "BUILD", gpu_stages.BUILD)
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", "/nowhere/libfdsd_cuda.so")
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 2
    assert "no CUDA kernels at /nowhere" in capsys.readouterr().err
    assert json.loads((tmp_path / "found.json").read_text())["checks"].keys() == {"build"}


def test_what_has_passed_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the sources have changed, or it is asked for; what failed is."""
    notes = "import sys; open(sys.argv[1], 'a').write('x'); "
    todo = [
        Check(stage, name, 60, (*python(f"{notes}raise SystemExit({status})"), str(tmp_path / name)))
        for stage, name, status in [(1, "one", 0), (1, "two", 1), (2, "three", 0)]
    ]
    only(monkeypatch, todo)

    def runs(*options: str) -> dict[str, int]:
        gpu_check.main(["--out", str(tmp_path / "found.json"), *options])
        return {check.name: len((tmp_path / check.name).read_text()) for check in todo}

    assert gpu_check.main(["--out", str(tmp_path / "found.json"), "--stage", "1"]) == 1
    assert not (tmp_path / "three").exists()
    assert runs() == {"one": 1, "two": 2, "three": 1}
    assert "one: passed before" in capsys.readouterr().out
    assert runs("--only", "one") == {"one": 2, "two": 2, "three": 1}
    assert runs("--stage", "2", "--again") == {"one": 2, "two": 2, "three": 2}
    monkeypatch.setattr(gpu_check, "sources_digest", lambda: "other")
    assert runs() == {"one": 3, "two": 3, "three": 3}
    monkeypatch.setattr(gpu_check, "gpu_name", lambda: "another GPU")
    assert runs("--stage", "2") == {"one": 3, "two": 3, "three": 4}
    assert json.loads((tmp_path / "found.json").read_text())["checks"].keys() == {"build", "three"}


@pytest.mark.parametrize("code", ["import time; time.sleep(600)", "raise SystemExit('no model')"])
def test_a_server_that_does_not_start_is_cut(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(served_answers, "_SERVER", python(code))
    check = Check(1, "served", 2, run=lambda limit_s: served_answers.serve_all([("any", ())], limit_s))
    result = gpu_check.result_of(check, pathlib.Path(os.devnull))
    assert not result["passed"]
    assert "server: expected a line that says where it serves" in result["tail"]
    assert ("no model" in result["tail"]) == ("no model" in code)


@pytest.mark.parametrize(("answer", "error"), [('{"choices": [{"text": "a"}]}', None), ("{}", "KeyError: 'choices'")])
def test_what_a_server_says_is_read_while_it_serves(
    monkeypatch: pytest.MonkeyPatch, answer: str, error: str | None
) -> None:
    monkeypatch.setattr(served_answers, "_SERVER", (*python(TALKS), answer))
    check = Check(1, "served", DEADLINE_S, run=lambda limit_s: served_answers.serve_all([("any", ())], limit_s))
    result = gpu_check.result_of(check, pathlib.Path(os.devnull))
    assert result["passed"] == (error is None), result["tail"]
    assert (error or "") in result["tail"]


def figures_of(scale: Scale, *names: str) -> dict[str, Any]:
    """What these checks find out at another scale."""
    found = {
        check.name: gpu_check.result_of(replace(check, limit_s=DEADLINE_S), pathlib.Path(os.devnull).parent)
        for check in gpu_stages.checks(scale)
        if check.name in names
    }
    assert [result["tail"] for result in found.values() if not result["passed"]] == []
    return {name: result["figures"] for name, result in found.items()}


def test_an_engine_is_measured_on_an_emulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    model = ("--model", str(small_model(tmp_path / "model", "llama-tiny")), "--max-model-len", "64")
    scale = Scale(timed=(*model, "--max-num-seqs", "2"), batches=(1, 2), prompt_lens=(4, 20), output_len=3)
    found = figures_of(scale, "decoding", "long prompt")
    assert [record["workload"]["batch"] for record in found["decoding"]["records"]] == [1, 2]
    assert found["long prompt"]["records"][0]["metrics"]["prefill_tokens_per_s"] > 0
    aims = gpu_aims.aims({"decoding": {"figures": found["decoding"]}})
    assert [aim["aim"] for aim in aims if aim["met"] is not None] == [
        "decoding: part of a step in which the GPU waits for the host"
    ]


def test_drafts_and_a_load_are_measured(tmp_path: pathlib.Path) -> None:
    """On the CPU, as the demo model is too large for an emulated GPU."""
    load = ("--concurrency", "2", "--num-requests", "4", "--prompt-len", "8", "--output-len", "4")
    scale = Scale(device="cpu", num_drafts=(2,), workloads=("completion",), load=load)
    found = figures_of(scale, "drafts", "load")
    drafts = [record["config"]["speculative_config"]["num_speculative_tokens"] for record in found["drafts"]["records"]]
    assert drafts == [2]
    assert found["load"]["num_complete"] == 4


@pytest.mark.parametrize("stage", gpu_stages.STAGES)
def test_a_stage_takes_at_most_nine_minutes(stage: int) -> None:
    wanted = [check for check in gpu_stages.checks() if gpu_check.is_wanted(check, [stage])]
    assert 0 < sum(check.limit_s for check in (gpu_stages.BUILD, *wanted)) <= 540


def test_every_test_for_a_gpu_is_in_a_stage() -> None:
    commands = [part for check in gpu_stages.checks() for part in check.command if "tests/" in part]
    folders = [served_answers.ROOT / part for part in commands]
    marked = [
        path for path in (served_answers.ROOT / "tests").rglob("*.py") if "pytest.mark." + "gpu" in path.read_text()
    ]
    assert len(marked) > 5
    assert [path for path in marked if not any(path.is_relative_to(folder) for folder in folders)] == []


def test_a_check_of_tests_must_run_some() -> None:
    expected = {check.name for check in gpu_stages.checks() if check.expected == gpu_stages.SOME_PASSED}
    tools = {"memcheck", "racecheck", "synccheck"}
    assert expected == {"ops", *tools, "golden", "families", "hand-over", "matrix"}


def test_what_goes_from_gpu_to_gpu_is_checked_without_a_model_on_the_cpu() -> None:
    """Which Paddle would be needed for."""
    [command] = [check.command for check in gpu_stages.checks() if check.name == "hand-over"]
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
    others = [timed[1] | {"others_us": {"FlashInfer": 121.0}}]
    timed += [cost("sampling", "256 requests x 6 rows, greedy", 50.0, 0.5)]
    timed += [cost("linear", f"wint8 4096x4096, {rows} rows", 5.0, 0.85, 0.59) for rows in (1, 64, 2048)]
    steps = [
        {"rows": rows, "requests": requests, "context": context, "ms": ms}
        for rows, requests, context, ms in [(1, 1, 512, 0.6), (1, 1, 64, 0.5), (8, 1, 64, 0.55), (8, 8, 64, 0.7)]
    ]
    stages = {
        "ops": {"passed": True},
        "verify": {"passed": False},
        "kernel times": {"figures": {"rates": {"copy_gb_per_s": 3000.0}, "costs": timed}},
        "other kernels": {"figures": {"costs": others}},
        "decoding": {"figures": {"records": [{"metrics": {"idle_ms": 0.1, "step_ms": {"p50": 2.5}}}]}},
        "auto": {"figures": {"records": [{"metrics": {"speed_up": gain}} for gain in (1.4, 0.97)]}},
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
        ("passed", True, True), *[("passed", None, None)] * 4, ("passed", False, False),
        ("passed", None, None), (">= 0.8", 0.79, False), (">= 1.0", 1.1, True), ("<= 1.15", 1.1, True),
        ("<= 1.3", 2.0, False), (">= 0.8", 0.85, True), (">= 0.6", 0.65, True), (">= 0.6", 0.59, False),
        (">= 0.6", None, None), ("<= 0.05", 0.04, True), (">= 0.98", 0.97, False), (">= 0.98", None, None),
        ("<= 1.4286", 1.2507, True), ("<= 1.4286", 1.6791, False), ("<= 1.15", 1.1, True), ("<= 0.05", 0.06, False),
        (">= 0.98", 0.99, True),
    ]  # fmt: skip
    assert {aim["met"] for aim in gpu_aims.aims({})} == {None}
    said = list(gpu_aims.summary(stages))
    assert said[0] == "attention, 64 requests x 8 rows, context 4096, 64:8 heads: 90.0 us, bound 58.5 us by issue, 65%"
    assert "missed: linear: of its bound, the case that is farthest from it: >= 0.6, got 0.59" in said
    assert len(said) == len(timed) - 1 + sum(aim["met"] is False for aim in found)
    assert set(gpu_aims._SHOWN) <= {check.name for check in gpu_stages.checks()}


def cost(kind: str, text: str, us: float, copy_share: float, bound_share: float | None = None) -> dict[str, Any]:
    bound_us = None if bound_share is None else us * bound_share
    shares = {"copy_share": copy_share, "bound_share": bound_share, "bound_us": bound_us, "limit": "issue"}
    return {"kind": kind, "text": text, "us": us, **shares}


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
    todo = [Check(1, device, 120, python(WITHOUT_PADDLE.replace("DEVICE", device))) for device in ("gpu", "cpu")]
    only(monkeypatch, todo)
    assert gpu_check.main(["--out", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert "lacks paddlepaddle, uvicorn" in said
    assert "\n\n" not in said
    findings = json.loads((tmp_path / "found.json").read_text())
    assert findings["missing_packages"] == ["paddlepaddle", "uvicorn"]
    _, on_gpu, on_cpu = findings["checks"].values()
    assert on_gpu["passed"], on_gpu["tail"]
    assert not on_cpu["passed"]
    assert "device: expected gpu, as Paddle is not installed, got cpu" in on_cpu["tail"]
