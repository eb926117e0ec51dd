"""Checks everything that needs a GPU on this machine's, in less than ten minutes, and keeps a JSON file of findings.

Usage: [PYTHON=python3] scripts/gpu_check.sh [--out FILE] [--full] [--only STAGE ...]

The kernels are compiled; their cases run on the GPU, then under compute-sanitizer; whole engine steps generate the
golden checkpoints' tokens and hold the promise, which `fastdeploy-sd verify` shows too; the demo model is served with
every method, with a second level of its prefix cache and, where there are two GPUs, on both, and must answer the same;
one process gets the KV of its prompts from another; kernels and steps are timed. With --full all other tests for a GPU
run behind these, the whole equality matrix among them, which takes long. A stage that fails or is cut at its limit,
with all that it started, is said so, and the others run; the file is written after each, and has what is aimed at
beside what was found (gpu_aims.py).

Without $PYTHON, .venv is made where there is none. With it, nothing is fetched: packages that this Python lacks are
named, and fail the stages that need them. Where it lacks Paddle, of which a GPU takes the names of element types alone,
these names stand in (scripts/without_paddle).

Status 0: all passed; 1: a stage failed; 2: no GPU here can be used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from scripts.gpu_aims import aims
from scripts.served_answers import GRACE_S, ROOT, child, serve_all

OUT = ROOT / "build" / "gpu-check.json"
SCHEMA_VERSION = 3  # of the file; raised when what it holds changes its meaning
_PADDLE = "paddlepaddle"
METHODS = ("naive", "ngram", "suffix", "mtp", "auto")
_TAIL = 4000
_REFUSAL_S = 30
_ASK = "from fastdeploy_sd.device.cuda.library import cuda_refusal; print(cuda_refusal() or '')"
_CLI = "import sys; from fastdeploy_sd.cli import main; sys.exit(main())"
# Neither the options of plugins that may be missing nor what other versions of packages warn of decides.
_PYTEST_OPTIONS = ("-o", "addopts=--import-mode=importlib", "-W", "default", "-p", "no:randomly")
_WITHOUT_PADDLE = ROOT / "scripts" / "without_paddle"
SOME_PASSED = r"\b[1-9]\d* passed"  # what pytest says where not all cases were skipped

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the check.

    Attributes:
        limit_s: it is cut then, and has failed.
        command: of a process whose status says whether it passed; {out} is a file for its figures. None = `run`.
        run: returns figures; raises where it fails.
        expected: a pattern of what the command must say, or it has failed.
        num_gpus, is_full: it is left out where there are fewer GPUs, or without --full.
    """

    name: str
    limit_s: float
    command: Sequence[str] = ()
    run: Callable[[float], Any] | None = None
    expected: str = ""
    num_gpus: int = 1
    is_full: bool = False


def stages() -> Sequence[Stage]:
    """Return the stages in order; the limits of those that always run are together less than ten minutes."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", *_PYTEST_OPTIONS)
    chosen = ("-k", "norm or rope or batch")
    sanitizer = (python, "scripts/cuda_sanitize.py", "--tool", "memcheck", *_PYTEST_OPTIONS, *chosen)
    engines = ("tests/engine", "tests/conformance", "tests/benchmarks")
    demo = ("--model", "demo", "--device", "gpu")
    small = ("--quick", "--requests", "24", "--prompt-tokens", "96", "--output-tokens", "20")
    verify = (python, "-c", _CLI, "verify", *demo, *small, "--json")
    return (
        Stage("build", 130, (python, "custom_ops/cuda_build.py", "--nvcc")),
        Stage("ops", 75, (*pytest, "tests/ops"), expected=SOME_PASSED),
        Stage("sanitizer", 60, sanitizer, expected=SOME_PASSED),
        Stage("engine", 70, (*pytest, "tests/engine/test_gpu.py"), expected=SOME_PASSED),
        Stage("verify", 45, (*verify, "--methods", "naive,ngram,suffix,mtp")),
        Stage("served", 45, run=lambda limit_s: serve_all([(m, (*demo, *speculation(m))) for m in METHODS], limit_s)),
        Stage("swap", 25, run=lambda limit_s: serve_all(with_and_without(demo, "--swap-space", "0.25"), limit_s)),
        # The others want a model on the CPU, and so Paddle.
        Stage("splitwise", 25, (*pytest, "tests/engine/test_gpu_handover.py", "-k", "goes_on"), expected=SOME_PASSED),
        Stage("two GPUs", 25, run=lambda limit_s: serve_all(with_and_without(demo, "-tp", "2"), limit_s), num_gpus=2),
        Stage("kernel times", 35, (python, "-m", "benchmarks", "gpu-kernels", "--json")),
        Stage("step times", 60, (python, "-m", "scripts.step_costs", "{out}", "--device", "gpu")),
        Stage("matrix", 3600, (*pytest, *engines), expected=SOME_PASSED, is_full=True),
    )


def _figures(command: Sequence[str], out: pathlib.Path, text: str) -> Any:
    """What a command wrote to its file, or said in JSON; None where it does neither."""
    said = text[text.index("{") : text.rindex("}") + 1] if "--json" in command else "null"
    return json.loads(out.read_text() if "{out}" in command else said)


def speculation(method: str) -> Sequence[str]:
    """The options of a server that drafts by a method."""
    drafts = {"method": method} if method in ("naive", "auto") else {"method": method, "num_speculative_tokens": 3}
    return "--speculative-config", json.dumps(drafts)


def with_and_without(options: Sequence[str], *added: str) -> Sequence[tuple[str, Sequence[str]]]:
    """Two servers that must answer the same."""
    return [("without", options), (" ".join(added), (*options, *added))]


def main(argv: Sequence[str]) -> int:
    """Run the stages; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE", help=f"findings (default: {OUT})")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in stages()], metavar="STAGE")
    parser.add_argument("--full", action="store_true", help="the equality matrix too, which takes long")
    args = parser.parse_args(argv)
    if (reason := refusal()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    todo = [stage for stage in stages() if is_wanted(stage, args.only, is_full=args.full)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    missing = missing_packages()
    if missing:
        print(f"gpu_check: {sys.executable} lacks {', '.join(missing)}", flush=True)
    if _PADDLE in missing:
        paths = [str(_WITHOUT_PADDLE), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    num_gpus = _captured(("nvidia-smi", "-L")).count("GPU ")
    findings = {
        "schema_version": SCHEMA_VERSION,
        "gpu": gpu_name(),
        "num_gpus": num_gpus,
        "missing_packages": missing,
        "refusal": "",
        "stages": found,
    }
    for stage in todo:
        if stage.num_gpus > max(num_gpus, 1):
            print(f"gpu_check: {stage.name}: left out: there are fewer than {stage.num_gpus} GPUs", flush=True)
            continue
        found[stage.name] = result_of(stage, args.out.parent)
        if stage.name == "build" and found["build"]["passed"]:
            findings["refusal"] = kernels_refusal()
        findings["aims"] = aims(found)
        args.out.write_text(json.dumps(findings, indent=1) + "\n")
        if findings["refusal"]:
            print(f"gpu_check: {findings['refusal']}", file=sys.stderr)
            return 2
    failed = ", ".join(name for name, result in found.items() if not result["passed"])
    print(f"gpu_check: {args.out}: " + (f"failed: {failed}" if failed else "all passed"))
    return 1 if failed else 0


def is_wanted(stage: Stage, only: Sequence[str] | None, *, is_full: bool) -> bool:
    """Whether a stage runs: one that is named does."""
    return (is_full or not stage.is_full) if only is None else stage.name in only


def missing_packages() -> list[str]:
    """Names of the packages that this one depends on, and that its tests do, which this Python lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [re.split(r"[^\w-]", text)[0] for text in project["dependencies"]]
    missing = [] if importlib.util.find_spec("paddle") else [_PADDLE]
    for name in (*wanted, "pytest", "hypothesis"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def refusal() -> str | None:
    """Why nothing can be checked here, None if it can."""
    done = _captured(("nvidia-smi", "-L"))
    return None if done.startswith("GPU ") else "expected a GPU that nvidia-smi lists, found none"


def kernels_refusal() -> str:
    """Why the kernels that were built cannot run, empty if they can."""
    return _captured((sys.executable, "-c", _ASK)).strip()


def gpu_name() -> str:
    """What nvidia-smi says of it."""
    return _captured(("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv"))


def result_of(stage: Stage, folder: pathlib.Path) -> dict[str, Any]:
    """Run one stage: whether it passed, its seconds, its figures and the end of what it said."""
    print(f"gpu_check: {stage.name}", flush=True)
    begin, figures, text = time.monotonic(), None, ""
    try:
        if stage.run is not None:
            figures = stage.run(stage.limit_s)
        else:
            out = folder / f"gpu-check-{stage.name.replace(' ', '-')}.json"
            text = _run([part.replace("{out}", str(out)) for part in stage.command], stage.limit_s)
            if not re.search(stage.expected, text):
                raise ValueError(f"expected {stage.expected!r} in what it says")
            figures = _figures(stage.command, out, text)
        passed = True
    except Exception as error:
        output = getattr(error, "output", None) or ""
        passed, text = False, f"{text}{output}\n{''.join(traceback.format_exception_only(error))}"
    seconds = round(time.monotonic() - begin, 1)
    print(f"gpu_check: {stage.name}: {'passed' if passed else 'failed'} in {seconds} s", flush=True)
    return {"passed": passed, "seconds": seconds, "figures": figures, "tail": text[-_TAIL:]}


def _run(command: Sequence[str], limit_s: float) -> str:
    with child(command, time.monotonic() + limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        begin = time.monotonic()
        text, _ = process.communicate(timeout=limit_s + GRACE_S)
        if time.monotonic() - begin >= limit_s:
            raise subprocess.TimeoutExpired(command, limit_s, output=text)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, output=text)
    return text


def _captured(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=_REFUSAL_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
