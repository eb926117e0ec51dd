"""`bench suite`: the table of docs/laboratory.md: models x weight formats x batch sizes.

Every configuration runs in a process of its own, so that none inherits another one's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.checkpoint import CHECKPOINT_DIR
from benchmarks.command import OUTPUT_DIR, Command, run_apart
from benchmarks.progress import Progress
from benchmarks.record import Record
from benchmarks.report import results_table
from fastdeploy_sd.config import DEMO_MODEL
from fastdeploy_sd.types.draft_methods import NAIVE

MODELS = (DEMO_MODEL, str(CHECKPOINT_DIR / "qwen3-0.6b"))
FORMATS = ("bfloat16", "wint8", "wint4")
# Plain decoding comes first: it is what every other method of the same configuration is compared with.
METHODS = (NAIVE,)


def main(argv: Sequence[str]) -> int:
    """Run the suite, write its records and print the table."""
    command = Command(
        "suite",
        "Measure the bundled model and a random checkpoint of a real shape in every weight format.",
        "of each `offline` run (--batch, --repeats, --num-threads, ...)",
    )
    text = f"(default: {' '.join(MODELS)})"
    command.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help=text)
    command.some("--formats", FORMATS, "of the weights (default: all)", FORMATS)
    command.folder(OUTPUT_DIR / "suite")
    args = command.read(argv)
    runs = [(model, fmt, method) for model in args.models for fmt in args.formats for method in METHODS]
    progress = Progress(len(runs), "suite")
    for model, fmt, method in runs:
        run_apart(["offline", *offline_arguments(model, fmt, method), "--output", str(args.output), *args.others])
        progress.advance(f"{model} {fmt} {method}")
    print(results_table(Record.load_all(args.output)))
    return 0


def offline_arguments(model: str, fmt: str, method: str) -> list[str]:
    """Return the `bench offline` arguments of one configuration."""
    weights = ["--dtype", fmt] if fmt == "bfloat16" else ["--quantization", fmt]
    return ["--model", model, *weights, "--speculative-config", f'{{"method": "{method}"}}']
