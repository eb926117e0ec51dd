"""Runs the small op cases on this machine's GPU under compute-sanitizer, once with every tool, and ends with status 1
where one finds something. The tool is that of a CUDA toolkit, or of the package nvidia-cuda-sanitizer-api.

Usage: python scripts/cuda_sanitize.py [--tool TOOL ...] [PYTEST ARGUMENT ...]

PYTEST ARGUMENTs select among the cases: -k linear.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from custom_ops import build, cuda_build  # noqa: E402
from tests.ops.cuda_device import SMALL_CASES, gpu, gpu_refusal  # noqa: E402

# Bounds and alignment; races in shared memory; barriers that not all threads reach. What threads read before anything
# was written there, initcheck, the emulation finds in shared memory.
TOOLS = ("memcheck", "racecheck", "synccheck")


def refusal() -> str | None:
    """Why nothing can be checked here, None if it can."""
    try:
        cuda_build.find_tool("compute-sanitizer")
    except build.BuildError as error:
        return str(error)
    reason = gpu_refusal()
    return None if reason is None else f"expected a GPU, found none: {reason}"


def command(tool: str, pytest_arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the cases under one tool."""
    sanitizer = [
        cuda_build.find_tool("compute-sanitizer"),
        "--tool",
        tool,
        "--error-exitcode",
        "1",
        "--target-processes",
        "all",
    ]
    return [*sanitizer, sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/ops/test_cuda.py", *pytest_arguments]


def main(arguments: Sequence[str]) -> int:
    """Run the tools and return the exit status: 2 where there is nothing to run them on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one; may be given again")
    options, pytest_arguments = parser.parse_known_args(arguments)
    if (reason := refusal()) is not None:
        print(f"cuda_sanitize: {reason}", file=sys.stderr)
        return 2
    gpu()  # compiled here, so that no compiler runs under the tools
    failed = []
    for tool in options.tool or TOOLS:
        print(f"cuda_sanitize: {tool}", flush=True)
        environment = {**os.environ, SMALL_CASES: "1"}
        if subprocess.run(command(tool, pytest_arguments), cwd=ROOT, env=environment, check=False).returncode != 0:
            failed.append(tool)
    if failed:
        print(f"cuda_sanitize: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
