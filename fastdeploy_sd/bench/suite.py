"""`bench suite`: the table of docs/laboratory.md: models x weight formats x batch sizes.

Every configuration runs in a process of its own, so that none inherits another one's memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_sd.bench.offline import CHECKPOINT_DIR, OUTPUT_DIR
from fastdeploy_sd.bench.progress import Progress
from fastdeploy_sd.bench.record import load_records
from fastdeploy_sd.bench.report import results_table
from fastdeploy_sd.config import DEMO_MODEL
from fastdeploy_sd.errors import FdsdError

MODELS = (DEMO_MODEL, str(CHECKPOINT_DIR / "qwen3-0.6b"))
FORMATS = ("bfloat16", "wint8", "wint4")
# Plain decoding comes first: it is what every other method of the same configuration is compared with.
METHODS = ("naive",)


def main(argv: Sequence[str]) -> int:
    """Run the suite, write its records and print the table.

    Raises:
        FdsdError: a configuration failed; its own message is above.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench suite",
        allow_abbrev=False,
        description="Measure the bundled model and a random checkpoint of a real shape in every weight format.",
        epilog="Other arguments go to each `bench offline` run (--batch, --repeats, --num-threads, ...).",
    )
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), metavar="MODEL", help=f"(default: {' '.join(MODELS)})"
    )
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), choices=FORMATS, help="of the weights (default: all)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=OUTPUT_DIR / "suite",
        metavar="DIR",
        help="for the records (default: %(default)s)",
    )
    args, rest = parser.parse_known_args(argv)
    runs = [(model, fmt, method) for model in args.models for fmt in args.formats for method in METHODS]
    progress = Progress(len(runs), "suite")
    for model, fmt, method in runs:
        _run([*offline_arguments(model, fmt, method), "--output", str(args.output), *rest])
        progress.advance(f"{model} {fmt} {method}")
    print(results_table(load_records(args.output)))
    return 0


def offline_arguments(model: str, fmt: str, method: str) -> list[str]:
    """Return the `bench offline` arguments of one configuration."""
    weights = ["--dtype", fmt] if fmt == "bfloat16" else ["--quantization", fmt]
    return ["--model", model, *weights, "--speculative-config", f'{{"method": "{method}"}}']


def _run(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "fastdeploy_sd.bench", "offline", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise FdsdError(f"benchmark: expected exit status 0, got {done.returncode} from: {' '.join(command)}")
