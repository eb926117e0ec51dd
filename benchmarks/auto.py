"""`bench auto`: the settings that a server could be fixed to, and the method that chooses by itself, cell by cell.

A cell is a model, a kind of text and a batch size. All settings of a cell run interleaved with plain decoding in one
process, each in an engine of its own over weights that they share.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from benchmarks import auto_served
from benchmarks.auto_report import KIND, account_table, auto_table, save_plot
from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command
from benchmarks.configurations import METHODS, speculative_of, without_cache_file
from benchmarks.engines import running_engine, verify_room
from benchmarks.hardware import describe_hardware
from benchmarks.interleaved import Turns, cell_metrics, run_in_turns
from benchmarks.progress import Progress
from benchmarks.prompts import MAX_PROMPT_LEN, WORKLOADS, make_prompts
from benchmarks.record import Record, config_json
from benchmarks.speculation_run import Case
from fastdeploy_sd.config import DEMO_MODEL, Config, SpeculativeConfig, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import draft_methods
from fastdeploy_sd.types.draft_methods import NAIVE

_SHAPE = str(CHECKPOINT_DIR / "qwen3-0.6b")
# Name of a model in this benchmark -> the engine's options for it.
MODELS: Mapping[str, Sequence[str]] = {
    "demo": ("--model", DEMO_MODEL),
    "0.6b-wint8": ("--model", _SHAPE, "--quantization", "wint8"),
    "0.6b-wint4": ("--model", _SHAPE, "--quantization", "wint4"),
}
_FIXED = ("ngram-2", "ngram-5", "suffix-3", "suffix-8", "mtp-1", "mtp-3")
SETTINGS = (*_FIXED, *(method.name for method in draft_methods.METHODS.values() if method.chooses))
# Plain decoding in a second engine.
PLAIN_AGAIN = f"{NAIVE}-again"
_SERVED = "--served"
_SETTING = re.compile(r"(?P<method>.+?)(?:-(?P<drafts>[1-9]\d*))?")
# Beyond prompt and output: what drafts of the last step may take.
_SPARE_LEN = 64
_MIN_OUTPUT_LEN = 32
_WARM_UP_LEN = 8
_WARM_UP_REPEAT = 1 << 20
_DIFFERENT_TOKENS = 1


def main(argv: Sequence[str]) -> int:
    """Measure every cell; write records, table and plot; 1 when a setting changed tokens that it must not change.

    With --served the rest are the arguments of `auto_served.main`.
    """
    if _SERVED in argv:
        return auto_served.main([argument for argument in argv if argument != _SERVED])
    command = Command(
        "auto",
        "Measure drafting settings beside plain decoding, all interleaved, over models, kinds of text and batch sizes."
        f" With {_SERVED} (which has a --help of its own): a server that drafts beside a plain one, over HTTP.",
        "the engine's (--num-threads, --kv-cache-dtype, ...)",
    )
    command.some("--models", MODELS, "(default: all)", tuple(MODELS))
    text = (
        f"METHOD or METHOD-DRAFTS each, of the methods {', '.join(METHODS)}; {NAIVE}: plain decoding once more, which "
        f"shows the noise (default: {' '.join(SETTINGS)})"
    )
    command.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="SETTING", help=text)
    command.number("--batch-sizes", (1, 2, 4, 8, 16, 32), "requests at once")
    command.some("--workloads", WORKLOADS, "(default: all)", WORKLOADS)
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling (default: 0)")
    command.number("--output-len", 128, "tokens", least=_MIN_OUTPUT_LEN)
    command.number("--repeats", 3)
    text = "a second table: what each setting's steps were and where their time went"
    command.add_argument("--explain", action="store_true", help=text)
    text = "count the processor's time and not the clock's: for machines that do other things; needs --num-threads 1"
    command.add_argument("--cpu-time", action="store_true", help=text)
    command.number("--seed", 0, "of the prompts", least=0)
    command.folder(OUTPUT_DIR / "auto", "for records, table and plot", "--out")
    args = command.read(argv)
    args.prog = command.prog
    settings = read_settings(args.settings)
    num_cells = len(args.models) * len(args.workloads) * len(args.batch_sizes)
    progress = Progress(num_cells * args.repeats, "auto")
    records = [record for model in args.models for record in _measure(model, settings, args, progress)]
    table = auto_table(records)
    if args.explain:
        table += f"\n\n{account_table(records)}"
    (args.out / "auto.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    try:
        save_plot(records, args.out / "auto.png")
    except ConfigError as error:  # the numbers are there without it
        print(f"error: {error.message}", file=sys.stderr)
    return 0 if all(r.metrics["has_same_tokens"] for r in records) else _DIFFERENT_TOKENS


def read_settings(names: Sequence[str]) -> dict[str, SpeculativeConfig]:
    """Return how each setting drafts, and plain decoding as the first of them.

    Args:
        names: METHOD or METHOD-DRAFTS each, e.g. "mtp-ngram" or "suffix-8"; without a number as many drafts as the
            method has in the other benchmarks. "naive" = plain decoding once more, which shows the noise.

    Raises:
        ConfigError: one names no method, is there twice, or its number of drafts does not suit the method.
    """
    settings = {NAIVE: SpeculativeConfig()}
    for name in names:
        if name == NAIVE:
            settings[PLAIN_AGAIN] = SpeculativeConfig()
            continue
        found = _SETTING.fullmatch(name)
        if found is None or found["method"] not in METHODS:
            known = ", ".join(METHODS)
            raise ConfigError(f"settings: expected one of {known}, or one with -DRAFTS, got {name!r}", param="settings")
        if name in settings:
            raise ConfigError(f"settings: expected each once, got {name!r} twice", param="settings")
        settings[name] = speculative_of(found["method"], None if found["drafts"] is None else int(found["drafts"]))
    return settings


def fixed_settings(settings: Mapping[str, SpeculativeConfig]) -> set[str]:
    """Return the names of those that draft by the same method in every step; the others choose between methods."""
    return {
        name
        for name, setting in settings.items()
        if name != PLAIN_AGAIN and not draft_methods.METHODS[setting.method].chooses
    }


def _measure(
    model: str, settings: Mapping[str, SpeculativeConfig], args: argparse.Namespace, progress: Progress
) -> Iterator[Record]:
    """Load an engine per setting and run every cell of a model."""
    config = _config(model, args)
    encoder = PromptEncoder(load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend))
    if args.cpu_time and config.num_threads != 1:
        raise ConfigError(f"num_threads: expected 1 with --cpu-time, got {config.num_threads}", param="num_threads")
    turns = Turns(args.temperature, time.process_time if args.cpu_time else None)
    fixed = fixed_settings(settings)
    with _running_engines(config, settings) as engines:
        for name, engine in engines.items():
            with_drafts = replace(config, speculative=settings[name])
            verify_room(engine, with_drafts, max(args.batch_sizes), MAX_PROMPT_LEN + args.output_len)
        warm_up = make_prompts(args.workloads[0], max(args.batch_sizes), encoder, args.seed)
        run_in_turns(engines, Case(args.workloads[0], warm_up, _MIN_OUTPUT_LEN), turns, _WARM_UP_REPEAT)
        for workload in args.workloads:
            for batch in args.batch_sizes:
                case = Case(workload, make_prompts(workload, batch, encoder, args.seed), args.output_len)
                repeats = []
                for repeat in range(args.repeats):
                    repeats.append(run_in_turns(engines, case, turns, repeat))
                    progress.advance(f"{model} {workload} {batch}")
                record = Record(
                    kind=KIND,
                    name=f"{model}-{workload}-b{batch}-t{args.temperature:g}",
                    config=config_json(config),
                    hardware=describe_hardware(),
                    workload={
                        "model": model,
                        "workload": workload,
                        "batch": batch,
                        "temperature": args.temperature,
                        "output_len": args.output_len,
                        "cpu_time": args.cpu_time,
                        "repeats": args.repeats,
                    },
                    metrics=cell_metrics(repeats, fixed, {PLAIN_AGAIN}),
                    repeats=[cell_metrics([repeat], fixed, {PLAIN_AGAIN}) for repeat in repeats],
                )
                record.save(args.out)  # at once: a run of many cells may be cut short
                yield record


def _config(model: str, args: argparse.Namespace) -> Config:
    """Plain decoding of a model with room for the largest cell, its packed weights in a file that engines share."""
    argv = [*MODELS[model], *args.others]
    ensure_checkpoint(argv)
    config = without_cache_file(load_config(argv, args.prog))
    max_len = MAX_PROMPT_LEN + args.output_len + _SPARE_LEN
    folder = config.model.packed_weights_cache or str(OUTPUT_DIR / "packed")
    return replace(
        config,
        model=replace(config.model, max_model_len=max_len, packed_weights_cache=folder),
        scheduler=replace(config.scheduler, max_num_seqs=max(args.batch_sizes)),
        speculative=SpeculativeConfig(),
    )


@contextmanager
def _running_engines(config: Config, settings: Mapping[str, SpeculativeConfig]) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running_engine(replace(config, speculative=speculative)))
            for name, speculative in settings.items()
        }
