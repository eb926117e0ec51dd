"""What gpu_check.py runs, by stage. Knows neither files of findings nor what has passed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.served_answers import load_one, serve_all

# Stage -> what it is about. With the build of the kernels none takes more than nine minutes.
STAGES = {1: "ops", 2: "answers", 3: "kernels", 4: "engine", 5: "other kernels", 6: "servers"}
METHODS = ("naive", "ngram", "suffix", "mtp", "auto")
SOME_PASSED = r"\b[1-9]\d* passed"  # what pytest says where not all cases were skipped
# Neither the options of plugins that may be missing nor what other versions of packages warn of decides.
PYTEST_OPTIONS = ("-o", "addopts=--import-mode=importlib", "-W", "default", "-p", "no:randomly")
_CLI = "import sys; from fastdeploy_sd.cli import main; sys.exit(main())"
_BUILD = "import logging, sys; logging.basicConfig(level=20); "
_BUILD += "from fastdeploy_sd.device.cuda.library import usable_library; "
_BUILD += "found = usable_library(may_build=True); sys.exit(found if isinstance(found, str) else 0)"
# Memory of the KV caches of two engines at once.
_SMALL_CACHE = ("--kv-cache-memory-gb", "2")


@dataclass(frozen=True, slots=True)
class Check:
    """A part of a stage.

    Attributes:
        limit_s: it is cut then, and has failed.
        command: of a process whose status says whether it passed; {out} is a file for its figures. None = `run`.
        run: returns figures; raises where it fails.
        expected: a pattern of what the command must say, or it has failed.
        num_gpus: it is left out where there are fewer.
        is_full: it is left out without --full.
    """

    stage: int
    name: str
    limit_s: float
    command: Sequence[str] = ()
    run: Callable[[float], Any] | None = None
    expected: str = ""
    num_gpus: int = 1
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """How large what is measured is.

    Attributes:
        served: options of the model that answers.
        timed: options of the model whose steps are timed; one of benchmarks' shapes is made where it is missing.
        batches: requests that decode at once.
        prompt_lens: of the batches, and of one long prompt.
        num_drafts: of speculation; without any is always measured too.
        load: options of the load on a server.
    """

    device: str = "gpu"
    served: Sequence[str] = ("--model", "demo")
    timed: Sequence[str] = ("--model", "build/bench/checkpoints/qwen3-0.6b", "--max-num-seqs", "64")
    batches: Sequence[int] = (1, 8, 64)
    prompt_lens: tuple[int, int] = (512, 8192)
    output_len: int = 64
    num_drafts: Sequence[int] = (1, 2, 3, 4, 5, 6, 7)
    workloads: Sequence[str] = ("code-edit", "completion", "free-text")
    load: Sequence[str] = ("--concurrency", "32", "--num-requests", "256")


# Compiles the kernels for this GPU, unless they are there; before all others.
BUILD = Check(1, "build", 120, (sys.executable, "-c", _BUILD))


def checks(scale: Scale = Scale()) -> Sequence[Check]:
    """Return the checks in order, but for BUILD."""
    return (*_ops(), *_answers(scale), *_kernels(), *_engine(scale), *_servers(scale))


def _ops() -> Sequence[Check]:
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", *PYTEST_OPTIONS)
    found = [Check(1, "ops", 90, (*pytest, "tests/ops"), expected=SOME_PASSED)]
    for tool, limit_s in (("memcheck", 90), ("racecheck", 150), ("synccheck", 90)):
        command = (python, "scripts/cuda_sanitize.py", "--tool", tool, *PYTEST_OPTIONS, "-k", "test_matches_reference")
        found.append(Check(1, tool, limit_s, command, expected=SOME_PASSED))
    return found


def _answers(scale: Scale) -> Sequence[Check]:
    python, gpu = sys.executable, ("--device", scale.device)
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu", *PYTEST_OPTIONS)
    small = ("--quick", "--requests", "24", "--prompt-tokens", "96", "--output-tokens", "20")
    verify = (python, "-c", _CLI, "verify", *scale.served, *gpu, *small, "--methods", ",".join(METHODS[:-1]), "--json")
    engines = ("tests/engine", "tests/conformance", "tests/benchmarks")
    return (
        # The second file says why it is left out where Paddle is no build for GPUs.
        Check(
            2,
            "golden",
            90,
            (*pytest, "-rs", "tests/engine/test_gpu.py", "tests/engine/test_gpu_paddle.py"),
            expected=SOME_PASSED,
        ),
        Check(2, "families", 200, (*pytest, "tests/engine/test_exactness.py"), expected=SOME_PASSED),
        Check(2, "verify", 60, verify),
        # The others want a model on the CPU, and so Paddle.
        Check(
            2, "hand-over", 30, (*pytest, "tests/engine/test_gpu_handover.py", "-k", "goes_on"), expected=SOME_PASSED
        ),
        Check(2, "two GPUs", 30, run=_same_with(scale, "-tp", "2"), num_gpus=2),
        Check(2, "matrix", 3600, (*pytest, *engines), expected=SOME_PASSED, is_full=True),
    )


def _kernels() -> Sequence[Check]:
    times = (sys.executable, "-m", "benchmarks", "gpu-kernels", "--json")
    return Check(3, "kernel times", 300, times), Check(5, "other kernels", 390, (*times, "--peers"))


def _engine(scale: Scale) -> Sequence[Check]:
    python, gpu, (short, long) = sys.executable, ("--device", scale.device), scale.prompt_lens
    bench = (python, "-m", "benchmarks")
    offline = (*bench, "offline", *scale.timed, *gpu, "--json", "--repeats", "2", "--speculative-config", "naive")
    batches = ("--prompt-len", str(short), "--output-len", str(scale.output_len), "--batch", *map(str, scale.batches))
    drafting = (*bench, "speculation", *scale.served, *gpu, *_SMALL_CACHE, "--json", "--repeats", "1", "--batch-sizes")
    counts = ("--num-drafts", *map(str, scale.num_drafts))
    return (
        Check(4, "decoding", 110, (*offline, *batches)),
        Check(4, "long prompt", 60, (*offline, "--prompt-len", str(long), "--output-len", "2", "--batch", "1")),
        Check(4, "drafts", 90, (*drafting, "1", "--methods", "mtp", *counts, "--workloads", scale.workloads[0])),
        Check(4, "auto", 90, (*drafting, "1", "8", "--methods", "auto", "--workloads", *scale.workloads)),
        Check(4, "step times", 60, (python, "-m", "scripts.step_costs", "{out}", *scale.timed, *gpu)),
    )


def _servers(scale: Scale) -> Sequence[Check]:
    served = (*scale.served, "--device", scale.device)
    methods = [(method, (*served, *speculation(method))) for method in METHODS]
    return (
        Check(6, "served", 90, run=lambda limit_s: serve_all(methods, limit_s)),
        Check(6, "swap", 40, run=_same_with(scale, "--swap-space", "0.25")),
        Check(6, "load", 120, run=lambda limit_s: load_one(served, scale.load, limit_s)),
    )


def speculation(method: str) -> Sequence[str]:
    """The options of a server that drafts by a method."""
    drafts = {"method": method} if method in ("naive", "auto") else {"method": method, "num_speculative_tokens": 3}
    return "--speculative-config", json.dumps(drafts)


def _same_with(scale: Scale, *added: str) -> Callable[[float], Any]:
    """Two servers, without and with some options, that must answer the same."""
    options = (*scale.served, "--device", scale.device)
    servers = [("without", options), (" ".join(added), (*options, *added))]
    return lambda limit_s: serve_all(servers, limit_s)
