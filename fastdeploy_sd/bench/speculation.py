"""`bench speculation`: what drafting methods gain over plain decoding, by workload and batch size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from fastdeploy_sd.bench.contenders import (
    METHODS,
    Contender,
    contenders_by_name,
    contenders_from_files,
    with_brackets,
)
from fastdeploy_sd.bench.hardware import describe_hardware
from fastdeploy_sd.bench.offline import CHECKPOINT_DIR, OUTPUT_DIR, ensure_checkpoint
from fastdeploy_sd.bench.plot import save_plot
from fastdeploy_sd.bench.prompts import MAX_PROMPT_LEN, WORKLOADS, make_prompts
from fastdeploy_sd.bench.record import Record, config_json
from fastdeploy_sd.bench.speculation_report import KIND, speculation_table
from fastdeploy_sd.bench.speculation_run import Case, Pair, pair_json, pair_metrics, run_pairs
from fastdeploy_sd.config import DEMO_MODEL, Config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.entrypoints.text.prompt import PromptEncoder
from fastdeploy_sd.entrypoints.text.tokenizer import load_tokenizer
from fastdeploy_sd.errors import ConfigError, suggest

_PROG = "python -m fastdeploy_sd.bench speculation"
_SHAPES = {"0.6b-shape": str(CHECKPOINT_DIR / "qwen3-0.6b")}
_DIFFERENT_TOKENS = 1
_MIN_OUTPUT_LEN = 8


def main(argv: Sequence[str]) -> int:
    """Measure every contender; write records, table and plot; 1 when a method that must not change tokens did.

    Raises:
        ConfigError: an option is wrong, or a method cannot be loaded.
    """
    args, engine_argv = _parser().parse_known_args(argv)
    _verify(args)
    contenders = _contenders(args, engine_argv)
    records: list[Record] = []
    with tqdm(total=len(contenders) * len(args.workloads) * len(args.batch_sizes) * args.repeats, disable=None) as bar:
        for contender in contenders:
            bar.set_description(contender.name)
            records += _measure(contender, args, bar)
    table = speculation_table(records)
    (args.out / "speculation.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    _plot(records, args.out, Path(contenders[0].config.model.model).name)
    return _DIFFERENT_TOKENS if any(_is_broken(r) for r in records) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        allow_abbrev=False,
        description="Measure drafting methods beside plain decoding of the same configuration, turn about, and check "
        "that both give the same tokens. Exit status 1 when they do not.",
        epilog="Every engine option is accepted too (--quantization, --num-threads, ...).",
    )
    text = "configurations to measure; none: --methods on --model"
    parser.add_argument("--config", nargs="+", metavar="FILE", help=text)
    text = f"'{DEMO_MODEL}', '0.6b-shape' (random weights in Qwen3-0.6B's shape) or a directory (default: {DEMO_MODEL})"
    parser.add_argument("--model", metavar="MODEL", help=text)
    text = f"some of {','.join(METHODS)} (default: all)"
    parser.add_argument("--methods", type=_words, metavar="A,B", help=text)
    text = "requests at once (default: 1,4,16)"
    parser.add_argument("--batch-sizes", type=_numbers, default=[1, 4, 16], metavar="N,N", help=text)
    text = f"some of {','.join(WORKLOADS)} (default: all)"
    parser.add_argument("--workloads", type=_words, default=list(WORKLOADS), metavar="A,B", help=text)
    parser.add_argument("--output-len", type=int, default=96, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)")
    text = "also run each method as if every draft were right, and as if every draft were wrong"
    parser.add_argument("--brackets", action="store_true", help=text)
    text = "folder for records, table and plot (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=OUTPUT_DIR / "speculation", metavar="DIR", help=text)
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _verify(args: argparse.Namespace) -> None:
    for name in args.workloads:
        if name not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise ConfigError(f"workloads: expected some of {known}, got {name!r}{suggest(name, WORKLOADS)}")
    limits = {"batch_sizes": (min(args.batch_sizes), 1), "repeats": (args.repeats, 1)}
    limits["output_len"] = (args.output_len, _MIN_OUTPUT_LEN)
    for name, (value, minimum) in limits.items():
        if value < minimum:
            raise ConfigError(f"{name}: expected at least {minimum}, got {value}", param=name)
    for name in ("model", "methods"):
        if args.config and getattr(args, name) is not None:
            raise ConfigError(f"{name}: expected without --config, whose files say it, got both", param=name)


def _contenders(args: argparse.Namespace, engine_argv: Sequence[str]) -> list[Contender]:
    if args.config:
        for path in args.config:
            ensure_checkpoint(["--config", path, *engine_argv])
        found = contenders_from_files(args.config, engine_argv, _PROG)
    else:
        model = args.model or DEMO_MODEL
        model_argv = ["--model", _SHAPES.get(model, model), *engine_argv]
        ensure_checkpoint(model_argv)
        found = contenders_by_name(args.methods or list(METHODS), model_argv, _PROG)
    if not args.brackets:
        return found
    return [bracket for contender in found for bracket in with_brackets(contender)]


def _measure(contender: Contender, args: argparse.Namespace, bar: tqdm[NoReturn]) -> list[Record]:
    """Load both engines once and run every case."""
    config = contender.config
    encoder = PromptEncoder(load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend))
    records = []
    with _engine(contender.naive_config) as naive, _engine(config) as drafting:
        _verify_room(args, config, drafting)
        for workload in args.workloads:
            for batch in args.batch_sizes:
                prompts = make_prompts(workload, batch, encoder, args.seed)
                pairs = run_pairs(
                    naive, drafting, Case(workload, prompts, args.output_len), args.repeats, lambda _: bar.update()
                )
                is_lossy = drafting.model_info.speculation.lossy
                records.append(_record(contender, workload, batch, pairs, is_lossy))
                records[-1].save(args.out)  # at once: a run of many cases may be cut short
    return records


@contextmanager
def _engine(config: Config) -> Iterator[Engine]:
    from fastdeploy_sd.worker.executor import create_executor  # brings in Paddle

    executor = create_executor(config)
    try:
        yield Engine(config, executor)
    finally:
        executor.shutdown()


def _verify_room(args: argparse.Namespace, config: Config, engine: Engine) -> None:
    """A batch must run as a whole, or the numbers would be those of queueing and preemption."""
    batch, info, max_num_seqs = max(args.batch_sizes), engine.model_info, config.scheduler.max_num_seqs
    if batch > max_num_seqs:
        raise ConfigError(
            f"max_num_seqs: expected at least the batch ({batch}), got {max_num_seqs}", param="max_num_seqs"
        )
    length = MAX_PROMPT_LEN + args.output_len
    if length > info.max_model_len:
        raise ConfigError(f"max_model_len: expected at least {length} (prompt + output), got {info.max_model_len}")
    lookahead = config.speculative.num_speculative_tokens + info.speculation.num_lookahead_slots
    needed = batch * -(-(length + lookahead) // info.block_size)
    if needed > info.num_blocks:
        raise ConfigError(f"kv_cache_memory_gb: expected room for {needed} blocks, got {info.num_blocks}")


def _record(contender: Contender, workload: str, batch: int, pairs: Sequence[Pair], is_lossy: bool) -> Record:
    model = contender.config.model
    weights = model.quantization or model.dtype
    method = contender.name.replace(" ", "-")
    return Record(
        kind=KIND,
        name=f"{Path(model.model).name}-{weights}-{method}-{workload}-b{batch}",
        config=config_json(contender.config),
        hardware=describe_hardware(),
        workload={
            "workload": workload,
            "batch": batch,
            "method": contender.name,
            "is_lossy": is_lossy,
            "repeats": len(pairs),
        },
        metrics=pair_metrics(pairs),
        repeats=[pair_json(pair) for pair in pairs],
    )


def _is_broken(record: Record) -> bool:
    return not record.metrics["has_same_tokens"] and not record.workload["is_lossy"]


def _plot(records: Sequence[Record], folder: Path, title: str) -> None:
    """The numbers are there without it: a missing matplotlib is said, and no failure."""
    try:
        save_plot(records, folder / "speculation.png", title)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
