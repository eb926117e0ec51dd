"""Checks everything that needs a GPU on this machine's, in less than ten minutes, and writes one JSON file of findings.

Usage: scripts/gpu_check.sh [--out FILE] [--only STAGE ...]

The kernels are compiled; their cases run on the GPU, then under compute-sanitizer; whole engine steps generate the
golden checkpoints' tokens and hold the promise; the demo model is served with every method, and must answer the same;
kernels and steps are timed. A stage that fails or is cut at its limit is said so, and the others run. Status 0: all
passed; 1: a stage failed; 2: there is no GPU that can be used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "gpu-check.json"
METHODS = ("naive", "ngram", "suffix", "auto")
_PROMPTS = ("def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "one two three four one two three")
_NUM_TOKENS = 64
_TAIL = 4000
_READY = re.compile(r"http://\S+:\d+")

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the check.

    Attributes:
        limit_s: it is cut then, and has failed.
        command: of a process whose status says whether it passed; {out} is a file for its figures. None = `run`.
        run: returns figures; raises where it fails.
    """

    name: str
    limit_s: float
    command: Sequence[str] = ()
    run: Callable[[float], Any] | None = None


def stages() -> Sequence[Stage]:
    """Return the stages in order; their limits are together less than ten minutes."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:randomly")
    sanitizer = (python, "scripts/cuda_sanitize.py", "--tool", "memcheck", "-k", "norm or rope or batch")
    return (
        Stage("build", 150, (python, "custom_ops/cuda_build.py", "--nvcc")),
        Stage("ops", 100, (*pytest, "tests/ops")),
        Stage("sanitizer", 100, sanitizer),
        Stage("engine", 80, (*pytest, "tests/engine/test_gpu.py")),
        Stage("served", 90, run=lambda limit_s: serve_all(("--model", "demo", "--device", "gpu"), limit_s)),
        Stage("step times", 40, (python, "-m", "benchmarks", "costs", "--device", "gpu", "--out", "{out}")),
    )


def main(argv: Sequence[str]) -> int:
    """Run the stages; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FILE", help=f"findings (default: {OUT})")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in stages()], metavar="STAGE")
    args = parser.parse_args(argv)
    if (reason := refusal()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    todo = [stage for stage in stages() if args.only is None or stage.name in args.only]
    found = {stage.name: result_of(stage, args.out.parent) for stage in todo}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"gpu": gpu_name(), "stages": found}, indent=1) + "\n")
    failed = [name for name, result in found.items() if not result["passed"]]
    print(f"gpu_check: {args.out}: " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def refusal() -> str | None:
    """Why nothing can be checked here, None if it can."""
    done = _captured(("nvidia-smi", "-L"))
    return None if done.startswith("GPU ") else "expected a GPU that nvidia-smi lists, found none"


def gpu_name() -> str:
    """What nvidia-smi says of the GPU."""
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
            figures = json.loads(out.read_text()) if "{out}" in stage.command else None
        passed = True
    except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
        passed, text = False, f"{text}{error}\n{getattr(error, 'output', None) or ''}"
    seconds = round(time.monotonic() - begin, 1)
    print(f"gpu_check: {stage.name}: {'passed' if passed else 'failed'} in {seconds} s", flush=True)
    return {"passed": passed, "seconds": seconds, "figures": figures, "tail": text[-_TAIL:]}


def serve_all(
    options: Sequence[str], limit_s: float, methods: Sequence[str] = METHODS, num_tokens: int = _NUM_TOKENS
) -> Mapping[str, float]:
    """Serve a model with one method after the other, and return the tokens per second of each.

    Args:
        options: of the server.

    Raises:
        AssertionError: a method answered something else than the first one.
        OSError, ValueError: a server did not start or answer.
    """
    end, rates, wanted = time.monotonic() + limit_s, {}, None
    for method in methods:
        with _server((*options, "--speculative-config", method), end) as url:
            begin = time.monotonic()
            answers = [_completion(url, prompt, num_tokens, end) for prompt in _PROMPTS]
            rates[method] = round(len(_PROMPTS) * num_tokens / (time.monotonic() - begin), 1)
        wanted = wanted or answers
        assert answers == wanted, f"{method}: expected {wanted}, got {answers}"
    return rates


@contextlib.contextmanager
def _server(options: Sequence[str], end: float) -> Iterator[str]:
    command = [sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", *options, "--port", "0"]
    said: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if " serving " in line and (match := _READY.search(line)):
                    yield match[0]
                    return
                if time.monotonic() > end:
                    break
            raise ValueError(f"server: expected a line that says where it serves, got {''.join(said)[-_TAIL:]}")
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            process.kill()


def _completion(url: str, prompt: str, num_tokens: int, end: float) -> str:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=max(end - time.monotonic(), 1)) as response:
        return str(json.load(response)["choices"][0]["text"])


def _run(command: Sequence[str], limit_s: float) -> str:
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=True
    )
    return done.stdout


def _captured(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ).stdout
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
