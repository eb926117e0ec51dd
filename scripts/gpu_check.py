"""Checks everything that needs a GPU on this machine's, in less than ten minutes, and keeps a JSON file of findings.

Usage: scripts/gpu_check.sh [--out FILE] [--only STAGE ...]

The kernels are compiled; their cases run on the GPU, then under compute-sanitizer; whole engine steps generate the
golden checkpoints' tokens and hold the promise; the demo model is served with every method, and must answer the same;
kernels and steps are timed. A stage that fails or is cut at its limit, with all that it started, is said so, and the
others run; the file is written after each. Status 0: all passed; 1: a stage failed; 2: no GPU here can be used.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "gpu-check.json"
METHODS = ("naive", "ngram", "suffix", "auto")
_PROMPTS = ("def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "one two three four one two three")
_NUM_TOKENS = 64
_NUM_TOGETHER = 8
_TAIL = 4000
_MAX_LINES = 400
_REFUSAL_S = 30
# For what was killed to end.
_GRACE_S = 5
_READY = re.compile(r" serving .*?(http://\S+:\d+)")
_IDLE = re.compile(r'step_time_seconds_total\{[^}]*phase="idle"[^}]*\} (\S+)')
_SERVER = (sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server")
_ASK = "from fastdeploy_sd.runtime.cuda_library import cuda_refusal; print(cuda_refusal() or '')"
# What pytest says where not all cases were skipped.
SOME_PASSED = r"\b[1-9]\d* passed"

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the check.

    Attributes:
        limit_s: it is cut then, and has failed.
        command: of a process whose status says whether it passed; {out} is a file for its figures. None = `run`.
        run: returns figures; raises where it fails.
        expected: a pattern of what the command must say, or it has failed.
    """

    name: str
    limit_s: float
    command: Sequence[str] = ()
    run: Callable[[float], Any] | None = None
    expected: str = ""


def stages() -> Sequence[Stage]:
    """Return the stages in order; their limits are together less than ten minutes."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:randomly")
    sanitizer = (python, "scripts/cuda_sanitize.py", "--tool", "memcheck", "-k", "norm or rope or batch")
    return (
        Stage("build", 150, (python, "custom_ops/cuda_build.py", "--nvcc")),
        Stage("ops", 100, (*pytest, "tests/ops"), expected=SOME_PASSED),
        Stage("sanitizer", 100, sanitizer, expected=SOME_PASSED),
        Stage("engine", 80, (*pytest, "tests/engine/test_gpu.py"), expected=SOME_PASSED),
        Stage("served", 100, run=lambda limit_s: serve_all(("--model", "demo", "--device", "gpu"), limit_s)),
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
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    findings = {"gpu": gpu_name(), "refusal": "", "stages": found}
    for stage in todo:
        found[stage.name] = result_of(stage, args.out.parent)
        if stage.name == "build" and found["build"]["passed"]:
            findings["refusal"] = kernels_refusal()
        args.out.write_text(json.dumps(findings, indent=1) + "\n")
        if findings["refusal"]:
            print(f"gpu_check: {findings['refusal']}", file=sys.stderr)
            return 2
    failed = [name for name, result in found.items() if not result["passed"]]
    print(f"gpu_check: {args.out}: " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def refusal() -> str | None:
    """Why nothing can be checked here, None if it can."""
    done = _captured(("nvidia-smi", "-L"))
    return None if done.startswith("GPU ") else "expected a GPU that nvidia-smi lists, found none"


def kernels_refusal() -> str:
    """Why the kernels that were built cannot run on the GPU, empty if they can."""
    return _captured((sys.executable, "-c", _ASK)).strip()


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
            if not re.search(stage.expected, text):
                raise ValueError(f"expected {stage.expected!r} in what it says")
            figures = json.loads(out.read_text()) if "{out}" in stage.command else None
        passed = True
    except Exception as error:
        output = getattr(error, "output", None) or ""
        passed, text = False, f"{text}{output}\n{''.join(traceback.format_exception_only(error))}"
    seconds = round(time.monotonic() - begin, 1)
    print(f"gpu_check: {stage.name}: {'passed' if passed else 'failed'} in {seconds} s", flush=True)
    return {"passed": passed, "seconds": seconds, "figures": figures, "tail": text[-_TAIL:]}


def serve_all(
    options: Sequence[str], limit_s: float, methods: Sequence[str] = METHODS, num_tokens: int = _NUM_TOKENS
) -> Mapping[str, Mapping[str, float]]:
    """Serve a model with one method after the other, and return the figures of each.

    These are the tokens per second of one request, and with _NUM_TOGETHER at once the part of the time in which the
    GPU had nothing to do between two steps.

    Args:
        options: of the server.

    Raises:
        AssertionError: a method answered something else than the first one.
        ValueError: a server did not start.
        OSError, http.client.HTTPException, KeyError: it did not answer, or something else than a completion.
    """
    end, figures, wanted = time.monotonic() + limit_s, dict[str, Mapping[str, float]](), None
    for method in methods:
        with _server((*options, "--speculative-config", method), end) as url:
            begin = time.monotonic()
            answers = [_completion(url, prompt, num_tokens, end) for prompt in _PROMPTS]
            rate = len(_PROMPTS) * num_tokens / (time.monotonic() - begin)
            share = _idle_share(url, num_tokens, end)
            figures[method] = {"tokens_per_s": round(rate, 1), f"idle_share_of_{_NUM_TOGETHER}": round(share, 4)}
        wanted = wanted or answers
        assert answers == wanted, f"{method}: expected {wanted}, got {answers}"
    return figures


def _idle_share(url: str, num_tokens: int, end: float) -> float:
    """How much of the time in which requests run together the GPU waits for the host."""
    idle_s, begin = _idle_s(url, end), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_NUM_TOGETHER) as pool:
        for asked in [pool.submit(_completion, url, _PROMPTS[0], num_tokens, end) for _ in range(_NUM_TOGETHER)]:
            asked.result()
    return (_idle_s(url, end) - idle_s) / (time.monotonic() - begin)


def _idle_s(url: str, end: float) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=max(end - time.monotonic(), 1)) as response:
        found = _IDLE.search(response.read().decode())
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def _server(options: Sequence[str], end: float) -> Iterator[str]:
    said: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with _child([*_SERVER, *options, "--port", "0"], end, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        threading.Thread(target=_drain, args=(process.stderr, said, found), daemon=True).start()
        try:
            url = _next(found, end)
            if url is None:
                raise ValueError("server: expected a line that says where it serves")
            yield url
        except Exception as error:
            error.add_note("".join(said)[-_TAIL // 2 :])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)


def _drain(stream: IO[str], said: collections.deque[str], found: queue.SimpleQueue[str | None]) -> None:
    """Read all that a server says, or it would wait for a reader; put its address, and None at the end."""
    with stream:
        for line in stream:
            said.append(line)
            if match := _READY.search(line):
                found.put(match[1])
    found.put(None)


def _next(found: queue.SimpleQueue[str | None], end: float) -> str | None:
    try:
        return found.get(timeout=max(end - time.monotonic(), 0))
    except queue.Empty:
        return None


def _completion(url: str, prompt: str, num_tokens: int, end: float) -> str:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=max(end - time.monotonic(), 1)) as response:
        return str(json.load(response)["choices"][0]["text"])


def _run(command: Sequence[str], limit_s: float) -> str:
    with _child(command, time.monotonic() + limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        begin = time.monotonic()
        text, _ = process.communicate(timeout=limit_s + _GRACE_S)
        if time.monotonic() - begin >= limit_s:
            raise subprocess.TimeoutExpired(command, limit_s, output=text)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, output=text)
    return text


@contextlib.contextmanager
def _child(
    command: Sequence[str], end: float, stdout: int | None = None, stderr: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed, with all that it started, at the end of its stage and at that of the body."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True, errors="replace", start_new_session=True
    )
    timer = threading.Timer(max(end - time.monotonic(), 0), _kill_group, (process,))
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        _kill_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _captured(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=_REFUSAL_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
