"""`bench forward`: what a whole step over M rows costs against a step over one, by weight format and context length."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command, run_apart, table_of
from benchmarks.engines import running_engine, weight_bytes
from benchmarks.hardware import describe_hardware, memory_json
from benchmarks.progress import Progress
from benchmarks.record import Record, config_json
from benchmarks.step_cost import FixedDrafts, Round, RowSteps, median_ratio
from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.errors import ConfigError

FORMATS = ("bfloat16", "wint8", "wint4")
ROWS = (1, 2, 4, 5, 8, 16, 32)
_STEPS_PER_ROUND = 4
KIND = "forward"
_AS_CONFIGURED = "as-configured"


def main(argv: Sequence[str]) -> int:
    """Measure every format in a process of its own, write the records and print their table."""
    text = "Time whole steps that verify M rows of one request, all M interleaved within one run."
    command = Command("forward", text, "the engine's (--model, --num-threads, --kv-cache-dtype, ...)")
    command.some("--formats", (*FORMATS, _AS_CONFIGURED), "of the weights (default: the first three)", FORMATS)
    command.number("--rows", ROWS, "1 among them")
    command.number("--contexts", (512, 4096), "tokens before them")
    command.number("--rounds", 12)
    command.folder(OUTPUT_DIR / "forward")
    args = command.read(argv)
    if 1 not in args.rows:
        raise ConfigError(f"rows: expected 1 among them, got {args.rows}", param="rows")
    if args.formats == [_AS_CONFIGURED]:
        for record in _measure(args, load_config(args.others, command.prog)):
            record.save(args.output)
        return 0
    model = [] if "--model" in args.others else ["--model", str(CHECKPOINT_DIR / "qwen3-0.6b")]
    ensure_checkpoint([*model, *args.others])
    progress = Progress(len(args.formats), "forward")
    for fmt in args.formats:
        weights = ["--dtype", fmt] if fmt == "bfloat16" else ["--quantization", fmt]
        run_apart(["forward", *argv, "--formats", _AS_CONFIGURED, *model, *weights])
        progress.advance(fmt)
    print(forward_table(Record.load_all(args.output)))
    return 0


def _measure(args: argparse.Namespace, config: Config) -> list[Record]:
    max_rows = max(args.rows)
    # Every round runs its steps once, and so does the round before the first.
    num_tokens = (args.rounds + 1) * len(args.rows) * _STEPS_PER_ROUND + max_rows + 1
    config = _with_drafts(config, max_rows, max(args.contexts) + num_tokens)
    drafts = FixedDrafts()
    with running_engine(config, lambda *_: drafts) as engine:
        progress = Progress(len(args.contexts) * args.rounds, str(config.model.quantization or config.model.dtype))
        records = []
        for context_len in args.contexts:
            steps = RowSteps(engine, drafts, context_len, num_tokens)
            rounds = steps.run(args.rows, args.rounds, lambda _: progress.advance())
            steps.close()
            records.append(_record(config, args.rows, context_len, rounds))
        return records


def _with_drafts(config: Config, max_rows: int, max_len: int) -> Config:
    """The configuration with room for one request of `max_len` tokens and max_rows - 1 drafts per step."""
    return replace(
        config,
        model=replace(config.model, max_model_len=max_len),
        scheduler=replace(config.scheduler, max_num_seqs=1),
        speculative=SpeculativeConfig("ngram", max_rows - 1) if max_rows > 1 else SpeculativeConfig(),
    )


def _record(config: Config, rows: Sequence[int], context_len: int, rounds: Sequence[Round]) -> Record:
    num_bytes = weight_bytes(config, context_len)
    shares = None if num_bytes is None else [r.bandwidth_share(num_bytes) for r in rounds]
    label = f"{config.model.quantization or config.model.dtype}-kv-{config.cache.kv_cache_dtype}"
    metrics = {
        "step_ms": {str(m): median(r.step_ms[m] for r in rounds) for m in rows},
        "step_ms_min": {str(m): min(r.step_ms[m] for r in rounds) for m in rows},
        "forward_ms": {str(m): median(r.forward_ms[m] for r in rounds) for m in rows},
        "ratio": {str(m): median_ratio(rounds, m) for m in rows},
        "bytes_per_step": num_bytes,
        "bandwidth_share": None if shares is None else median(shares),
        "outside_forward_us": median((r.step_ms[1] - r.forward_ms[1]) * 1e3 for r in rounds),
        "read_gb_per_s_min": min(r.memory.read_gb_per_s for r in rounds),
        "read_gb_per_s_max": max(r.memory.read_gb_per_s for r in rounds),
    }
    return Record(
        kind=KIND,
        name=f"{Path(config.model.model).name}-{label}-c{context_len}",
        config=config_json(config),
        hardware=describe_hardware(),
        workload={"context_len": context_len, "rows": list(rows), "rounds": len(rounds)},
        metrics=metrics,
        repeats=[
            {
                "step_ms": {str(m): r.step_ms[m] for m in rows},
                "forward_ms": {str(m): r.forward_ms[m] for m in rows},
                "memory": memory_json(r.memory),
            }
            for r in rounds
        ],
    )


def forward_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown, ordered by context and weight format.

    A column T(M) is the median over the rounds of a step over M rows against one over a single row. Share is what a
    one-row step reads over its time, against the read bandwidth measured in the same round.
    """
    rows = sorted((r for r in records if r.kind == KIND), key=lambda r: (r.workload["context_len"], _order(r)))
    sizes = sorted({m for r in rows for m in r.workload["rows"]} - {1})
    columns: dict[str, str | Callable[[Record], object]] = {
        "Weights": "{0.weights}",
        "KV": "{0.config[kv_cache_dtype]}",
        "Context": "{0.workload[context_len]}",
        "T(1) ms": lambda r: f"{r.metrics['step_ms']['1']:.2f}",
        **{f"T({size})/T(1)": partial(_ratio, size) for size in sizes},
        "MB read": lambda r: (
            None if r.metrics["bytes_per_step"] is None else f"{r.metrics['bytes_per_step'] / 1e6:.0f}"
        ),
        "Share": "{0.metrics[bandwidth_share]:.0%}",
        "Outside the model us": "{0.metrics[outside_forward_us]:.0f}",
        "Memory GB/s": "{0.metrics[read_gb_per_s_min]:.0f}-{0.metrics[read_gb_per_s_max]:.0f}",
    }
    return table_of(rows, columns)


def _ratio(size: int, record: Record) -> str | None:
    ratio = record.metrics["ratio"].get(str(size))
    return None if ratio is None else f"{ratio:.2f}"


def _order(record: Record) -> tuple[int, str]:
    return -len(record.weights), record.weights + str(record.config["kv_cache_dtype"])
