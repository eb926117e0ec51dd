"""`bench speculation`: what drafting methods gain over plain decoding, by workload and batch size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command
from benchmarks.configurations import (
    METHODS,
    Configuration,
    configurations_by_name,
    configurations_from_files,
    with_bounds,
)
from benchmarks.engines import running_engine, verify_room
from benchmarks.hardware import describe_hardware
from benchmarks.progress import Progress
from benchmarks.prompts import MAX_PROMPT_LEN, WORKLOADS, make_prompts
from benchmarks.record import Record, config_json
from benchmarks.speculation_report import KIND, save_plot, speculation_table
from benchmarks.speculation_run import Case, Pair, pair_json, pair_metrics, run_pairs
from fastdeploy_sd.config import DEMO_MODEL
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer

_SHAPES = {"0.6b-shape": str(CHECKPOINT_DIR / "qwen3-0.6b")}
_DIFFERENT_TOKENS = 1
_MIN_OUTPUT_LEN = 8


def main(argv: Sequence[str]) -> int:
    """Measure every configuration; write records, table and plot; 1 when a method that must not change tokens did."""
    args = _read(argv)
    configurations = _configurations(args)
    records: list[Record] = []
    num_cases = len(configurations) * len(args.workloads) * len(args.batch_sizes)
    progress = Progress(num_cases * args.repeats, "speculation")
    for configuration in configurations:
        records += _measure(configuration, args, progress)
    table = speculation_table(records)
    (args.out / "speculation.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    try:
        save_plot(records, args.out / "speculation.png", Path(configurations[0].config.model.model).name)
    except ConfigError as error:  # the numbers are there without it
        print(f"error: {error.message}", file=sys.stderr)
    return _DIFFERENT_TOKENS if any(_is_broken(r) for r in records) else 0


def _read(argv: Sequence[str]) -> argparse.Namespace:
    command = Command(
        "speculation",
        "Measure drafting methods beside plain decoding of the same configuration, interleaved, and verify that both"
        " give the same tokens. Exit status 1 when they do not.",
        "the engine's (--quantization, --num-threads, ...)",
    )
    text = "configurations to measure; none: --methods on --model"
    command.add_argument("--config", nargs="+", metavar="FILE", help=text)
    text = f"'{DEMO_MODEL}', '0.6b-shape' (random weights in Qwen3-0.6B's shape) or a directory (default: {DEMO_MODEL})"
    command.add_argument("--model", metavar="MODEL", help=text)
    command.some("--methods", METHODS, "(default: all)")
    command.number("--batch-sizes", (1, 4, 16), "requests at once")
    command.some("--workloads", WORKLOADS, "(default: all)", WORKLOADS)
    command.number("--output-len", 96, "tokens", least=_MIN_OUTPUT_LEN)
    command.number("--repeats", 3)
    command.number("--seed", 0, "of the prompts", least=0)
    text = "also run each method as if every draft were right, and as if every draft were wrong"
    command.add_argument("--bounds", action="store_true", help=text)
    command.folder(OUTPUT_DIR / "speculation", "for records, table and plot", "--out")
    args = command.read(argv)
    args.prog = command.prog
    for name in ("model", "methods"):
        if args.config and getattr(args, name) is not None:
            raise ConfigError(f"{name}: expected without --config, whose files say it, got both", param=name)
    return args


def _configurations(args: argparse.Namespace) -> list[Configuration]:
    if args.config:
        for path in args.config:
            ensure_checkpoint(["--config", path, *args.others])
        found = configurations_from_files(args.config, args.others, args.prog)
    else:
        model = args.model or DEMO_MODEL
        model_argv = ["--model", _SHAPES.get(model, model), *args.others]
        ensure_checkpoint(model_argv)
        found = configurations_by_name(args.methods or list(METHODS), model_argv, args.prog)
    return [variant for one in found for variant in with_bounds(one)] if args.bounds else found


def _measure(configuration: Configuration, args: argparse.Namespace, progress: Progress) -> list[Record]:
    """Load both engines once and run every case."""
    config = configuration.config
    encoder = PromptEncoder(load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend))
    records = []
    with running_engine(configuration.naive_config) as naive, running_engine(config) as drafting:
        verify_room(drafting, config, max(args.batch_sizes), MAX_PROMPT_LEN + args.output_len)
        for workload in args.workloads:
            for batch in args.batch_sizes:
                prompts = make_prompts(workload, batch, encoder, args.seed)
                case = Case(workload, prompts, args.output_len)
                advance = partial(_advance, progress, f"{configuration.name} {workload} {batch}")
                pairs = run_pairs(naive, drafting, case, args.repeats, advance)
                is_lossy = drafting.model_info.speculation.lossy
                records.append(_record(configuration, workload, batch, pairs, is_lossy))
                records[-1].save(args.out)  # at once: a run of many cases may be cut short
    return records


def _advance(progress: Progress, stage: str, _: Pair) -> None:
    progress.advance(stage)


def _record(configuration: Configuration, workload: str, batch: int, pairs: Sequence[Pair], is_lossy: bool) -> Record:
    model = configuration.config.model
    weights = model.quantization or model.dtype
    method = configuration.name.replace(" ", "-")
    return Record(
        kind=KIND,
        name=f"{Path(model.model).name}-{weights}-{method}-{workload}-b{batch}",
        config=config_json(configuration.config),
        hardware=describe_hardware(),
        workload={
            "workload": workload,
            "batch": batch,
            "method": configuration.name,
            "is_lossy": is_lossy,
            "repeats": len(pairs),
        },
        metrics=pair_metrics(pairs),
        repeats=[pair_json(pair) for pair in pairs],
    )


def _is_broken(record: Record) -> bool:
    return not record.metrics["has_same_tokens"] and not record.workload["is_lossy"]
