"""`bench speculation`: what drafting methods gain over plain decoding, by workload and batch size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command, Progress, show, table_of
from benchmarks.configurations import (
    METHODS,
    Configuration,
    configurations_by_name,
    configurations_from_files,
    with_bounds,
)
from benchmarks.engines import running_engine, verify_room
from benchmarks.hardware import describe_hardware
from benchmarks.plot import panels
from benchmarks.prompts import MAX_PROMPT_LEN, WORKLOADS, make_prompts
from benchmarks.record import Record, config_json
from benchmarks.speculation_run import Case, Pair, pair_json, pair_metrics, run_pairs
from fastdeploy_sd.config import DEMO_MODEL
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer

_SHAPES = {"0.6b-shape": str(CHECKPOINT_DIR / "qwen3-0.6b")}
_DIFFERENT_TOKENS = 1
_MIN_OUTPUT_LEN = 8
KIND = "speculation"
_PLOTTED = {"speed_up": "speed-up over naive", "acceptance_length": "acceptance length, tokens"}
_GROUP_WIDTH = 0.8


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
    show(args, {"records": records}, table)
    try:
        save_plot(records, args.out / "speculation.png", Path(configurations[0].config.model.model).name)
    except ConfigError as error:  # the numbers are there without it
        print(f"error: {error.message}", file=sys.stderr)
    return _DIFFERENT_TOKENS if any(_is_broken(r) for r in records) else 0


def _read(argv: Sequence[str]) -> argparse.Namespace:
    command = Command(
        "speculation",
        "Compare drafting methods with plain decoding of the same configuration, interleaved, and verify that both"
        " give the same tokens. Exit status 1 when they do not.",
        "the engine's (--quantization, --num-threads, ...)",
    )
    text = "configurations to measure; none: --methods on --model"
    command.add_argument("--config", nargs="+", metavar="FILE", help=text)
    text = f"'{DEMO_MODEL}', '0.6b-shape' (random weights in Qwen3-0.6B's shape) or a directory (default: {DEMO_MODEL})"
    command.add_argument("--model", metavar="MODEL", help=text)
    command.some("--methods", METHODS, "(default: all)")
    command.number("--num-drafts", (), "drafts of every method, each number in turn, in place of its own")
    command.number("--batch-sizes", (1, 4, 16), "requests at once")
    command.some("--workloads", WORKLOADS, "(default: all)", WORKLOADS)
    command.number("--output-len", 96, "tokens", least=_MIN_OUTPUT_LEN)
    command.number("--repeats", 3)
    command.number("--seed", 0, "of the prompts", least=0)
    text = "also run each method as if every draft were right, and as if every draft were wrong"
    command.add_argument("--bounds", action="store_true", help=text)
    command.folder(OUTPUT_DIR / "speculation", "for records, table and plot", "--out")
    command.json()
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
        found = configurations_by_name(args.methods or list(METHODS), model_argv, args.prog, args.num_drafts)
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


def _same_tokens(record: Record) -> str:
    if record.metrics["has_same_tokens"]:
        return "yes"
    return "no (lossy)" if record.workload["is_lossy"] else "NO"


_COLUMNS: Mapping[str, str | Callable[[Record], object]] = {
    "Workload": "{0.workload[workload]}",
    "Batch": "{0.workload[batch]}",
    "Method": "{0.workload[method]}",
    "k": "{0.config[speculative_config][num_speculative_tokens]}",
    "Speed-up": lambda r: f"{r.metrics['speed_up']:.2f}x" + (" (slower)" if r.metrics["speed_up"] < 1.0 else ""),
    "of repeats": "{0.metrics[speed_up_min]:.2f}-{0.metrics[speed_up_max]:.2f}",
    "Tokens/s": "{0.metrics[decode_tokens_per_s]:.1f}",
    "Naive tokens/s": "{0.metrics[naive_decode_tokens_per_s]:.1f}",
    "Acceptance length": "{0.metrics[acceptance_length]:.2f}",
    "Accepted": "{0.metrics[acceptance_rate]:.0%}",
    "Tokens per step": "{0.metrics[tokens_per_step]:.2f}",
    "Step ms": "{0.metrics[step_ms]:.2f}",
    "Naive step ms": "{0.metrics[naive_step_ms]:.2f}",
    "Forward ms": "{0.metrics[forward_ms]:.2f}",
    "Verify ms": "{0.metrics[verify_ms]:.2f}",
    "Draft ms": "{0.metrics[draft_ms]:.2f}",
    "Memory GB/s": "{0.metrics[read_gb_per_s_min]:.0f}-{0.metrics[read_gb_per_s_max]:.0f}",
    "Same tokens": _same_tokens,
}


def speculation_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown, ordered by workload, batch and method.

    Memory is the read bandwidth before and after every repeat, the slowest and the fastest: where they are far apart,
    the machine changed while it was measured.
    """
    return table_of(sorted((r for r in records if r.kind == KIND), key=_order), _COLUMNS)


def _order(record: Record) -> tuple[object, ...]:
    work = record.workload
    return WORKLOADS.index(work["workload"]), work["batch"], work["method"]


def save_plot(records: Sequence[Record], path: Path, title: str) -> None:
    """Write a PNG: a column of panels per workload, a group of bars per method, a bar per batch size.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    workloads = [w for w in WORKLOADS if any(r.workload["workload"] == w for r in records)]
    with panels(path, len(_PLOTTED), len(workloads), title, share_y="row") as grid:
        for row, (metric, label) in enumerate(_PLOTTED.items()):
            for column, workload in enumerate(workloads):
                _draw(grid[row][column], [r for r in records if r.workload["workload"] == workload], metric)
            grid[row][0].set_ylabel(label)
        for panel, workload in zip(grid[0], workloads, strict=True):
            panel.set_title(workload)
        grid[0][-1].legend(title="batch", fontsize="small")


def _draw(panel: Any, records: Sequence[Record], metric: str) -> None:
    methods = list(dict.fromkeys(r.workload["method"] for r in records))
    batches = sorted({r.workload["batch"] for r in records})
    bar = _GROUP_WIDTH / len(batches)
    for i, batch in enumerate(batches):
        values = {r.workload["method"]: r.metrics for r in records if r.workload["batch"] == batch}
        shown = [(x, values[method]) for x, method in enumerate(methods) if method in values]
        places = [x + (i - (len(batches) - 1) / 2) * bar for x, _ in shown]
        heights = [m[metric] for _, m in shown]
        panel.bar(places, heights, bar, label=str(batch))
        if metric == "speed_up":
            spans = [[m[metric] - m["speed_up_min"], m["speed_up_max"] - m[metric]] for _, m in shown]
            panel.errorbar(places, heights, list(zip(*spans, strict=True)), fmt="none", ecolor="black", elinewidth=0.8)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(methods)), methods, rotation=30, ha="right", fontsize="small")
