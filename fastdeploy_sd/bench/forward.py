"""`bench forward`: what a whole step over M rows costs against a step over one, by weight format and context length."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fastdeploy_sd.bench.forward_report import KIND, forward_table
from fastdeploy_sd.bench.hardware import describe_hardware, memory_json
from fastdeploy_sd.bench.offline import CHECKPOINT_DIR, OUTPUT_DIR, ensure_checkpoint
from fastdeploy_sd.bench.progress import Progress
from fastdeploy_sd.bench.record import Record, config_json, load_records
from fastdeploy_sd.bench.step_cost import FixedDrafts, Round, RowSteps, median_ratio
from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step

_PROG = "python -m fastdeploy_sd.bench forward"
FORMATS = ("bfloat16", "wint8", "wint4")
ROWS = (1, 2, 4, 5, 8, 16, 32)
_STEPS_PER_ROUND = 4


def main(argv: Sequence[str]) -> int:
    """Measure every format in a process of its own, write the records and print their table.

    Raises:
        ConfigError: an option is wrong, or the model has no room for the context.
        FdsdError: the run of one format failed; its own message is above.
    """
    args, engine_argv = _parser().parse_known_args(argv)
    _verify(args)
    if args.formats == ["as-configured"]:
        for record in _measure(args, engine_argv):
            record.save(args.output)
        return 0
    model = [] if "--model" in engine_argv else ["--model", str(CHECKPOINT_DIR / "qwen3-0.6b")]
    ensure_checkpoint([*model, *engine_argv])
    progress = Progress(len(args.formats), "forward")
    for fmt in args.formats:
        weights = ["--dtype", fmt] if fmt == "bfloat16" else ["--quantization", fmt]
        _run([*argv, "--formats", "as-configured", *model, *weights])
        progress.advance(fmt)
    print(forward_table(load_records(args.output)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        allow_abbrev=False,
        description="Time whole steps that verify M rows of one request, all M turn about within one run.",
        epilog="Every engine option is accepted too (--model, --num-threads, --kv-cache-dtype, ...).",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(FORMATS),
        choices=(*FORMATS, "as-configured"),
        help=f"of the weights (default: {' '.join(FORMATS)})",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=list(ROWS),
        metavar="M",
        help=f"1 among them (default: {' '.join(map(str, ROWS))})",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 4096],
        metavar="N",
        help="tokens before them (default: 512 4096)",
    )
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=OUTPUT_DIR / "forward",
        metavar="DIR",
        help="for the JSON records (default: %(default)s)",
    )
    return parser


def _verify(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise ConfigError(f"rounds: expected at least 1, got {args.rounds}", param="rounds")
    if min(args.contexts) < 1:
        raise ConfigError(f"contexts: expected at least 1 token, got {min(args.contexts)}", param="contexts")
    if min(args.rows) < 1 or 1 not in args.rows:
        raise ConfigError(f"rows: expected numbers from 1 on, 1 among them, got {args.rows}", param="rows")


def _run(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "fastdeploy_sd.bench", "forward", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise FdsdError(f"benchmark: expected exit status 0, got {done.returncode} from: {' '.join(command)}")


def _measure(args: argparse.Namespace, engine_argv: Sequence[str]) -> list[Record]:
    from fastdeploy_sd.worker.executor import create_executor  # brings in Paddle

    max_rows = max(args.rows)
    # Every round runs its steps once, and so does the round before the first.
    num_tokens = (args.rounds + 1) * len(args.rows) * _STEPS_PER_ROUND + max_rows + 1
    config = _with_drafts(load_config(engine_argv, _PROG), max_rows, max(args.contexts) + num_tokens)
    made: list[FixedDrafts] = []

    def make(speculative: SpeculativeConfig, context: Any) -> FixedDrafts:
        made.append(FixedDrafts(speculative, context))
        return made[-1]

    executor = create_executor(config, make)
    try:
        engine = Engine(config, executor)
        progress = Progress(len(args.contexts) * args.rounds, str(config.model.quantization or config.model.dtype))
        records = []
        for context_len in args.contexts:
            steps = RowSteps(engine, made[0], context_len, num_tokens)
            rounds = steps.run(args.rows, args.rounds, lambda _: progress.advance())
            steps.close()
            records.append(_record(config, args.rows, context_len, rounds))
        return records
    finally:
        executor.shutdown()


def _with_drafts(config: Config, max_rows: int, max_len: int) -> Config:
    """The configuration with room for one request of `max_len` tokens and max_rows - 1 drafts per step."""
    return replace(
        config,
        model=replace(config.model, max_model_len=max_len),
        scheduler=replace(config.scheduler, max_num_seqs=1),
        speculative=SpeculativeConfig("ngram", max_rows - 1) if max_rows > 1 else SpeculativeConfig(),
    )


def _record(config: Config, rows: Sequence[int], context_len: int, rounds: Sequence[Round]) -> Record:
    num_bytes = _bytes_per_step(config, context_len)
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


def _bytes_per_step(config: Config, context_len: int) -> int | None:
    """Bytes of weights and KV that a step must read, None for a mixture of experts."""
    from fastdeploy_sd.checkpoint import Checkpoint
    from fastdeploy_sd.models.registry import read_decoder_config
    from fastdeploy_sd.quantization.scheme import QuantScheme
    from fastdeploy_sd.worker.kv_sizing import KvCacheFormat, block_bytes

    decoder = read_decoder_config(Checkpoint(config.model.path).config)
    weights = weight_bytes_per_step(decoder, QuantScheme.create(config.model.dtype, config.model.quantization))
    if weights is None:
        return None
    kv_format = KvCacheFormat.create(config)
    return weights + context_len * block_bytes(decoder, kv_format) // kv_format.block_size
