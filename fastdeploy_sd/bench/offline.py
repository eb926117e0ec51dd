"""`bench offline`: prefill and decode speed of a configuration in this process, for several batch sizes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from fastdeploy_sd.bench.checkpoint import SHAPES, add_mtp_layer, make_checkpoint
from fastdeploy_sd.bench.contenders import without_cache_file
from fastdeploy_sd.bench.hardware import MemorySpeed, describe_hardware, measure_memory, memory_json
from fastdeploy_sd.bench.offline_run import Sample, Workload, acceptance, phase_ms, run_once
from fastdeploy_sd.bench.percentiles import percentiles
from fastdeploy_sd.bench.progress import Progress
from fastdeploy_sd.bench.record import Record, config_json
from fastdeploy_sd.bench.report import results_table
from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.sources import read_command_line
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step

OUTPUT_DIR = Path("build", "bench")
CHECKPOINT_DIR = OUTPUT_DIR / "checkpoints"
_PROG = "python -m fastdeploy_sd.bench offline"
_WARM_UP_LEN = 4
# Repeat numbers below this are measured; the warm-up's prompts must differ from theirs.
_WARM_UP_REPEAT = 1 << 20
_MIN_OUTPUT_LEN = 2
# Time is per repeat as {p50, ..}; everything else of a record's metrics is one number.
_TIMES = ("ttft_ms", "itl_ms", "e2e_ms", "step_ms")


def main(argv: Sequence[str]) -> int:
    """Run the command, write one record per batch size, print their table.

    A configuration that drafts is measured after plain decoding of the same configuration, which is in the table too.

    Raises:
        ConfigError: an option is wrong, or the configuration has no room for the batch.
    """
    args, engine_argv = _parser().parse_known_args(argv)
    ensure_checkpoint(engine_argv)
    config = load_config(engine_argv, _PROG)
    workloads = [Workload(batch, args.prompt_len, args.output_len, args.seed) for batch in args.batch]
    records = []
    for measured in _with_naive(without_cache_file(config)):
        for record in run_offline(measured, workloads, args.repeats):
            record.save(args.output)
            records.append(record)
    print(results_table(records))
    return 0


def run_offline(config: Config, workloads: Sequence[Workload], repeats: int) -> list[Record]:
    """Load the model once and measure every workload.

    Raises:
        ConfigError: a workload is empty, or does not fit into the configuration as a whole.
    """
    from fastdeploy_sd.worker.executor import create_executor  # brings in Paddle

    if repeats < 1:
        raise ConfigError(f"repeats: expected at least 1, got {repeats}")
    executor = create_executor(config)
    try:
        engine = Engine(config, executor)
        for workload in workloads:
            _verify_room(workload, engine, config)
        progress = Progress(len(workloads) * repeats, _run_name(config))
        return [_measure(engine, config, workload, repeats, progress) for workload in workloads]
    finally:
        executor.shutdown()


def ensure_checkpoint(engine_argv: Sequence[str]) -> None:
    """Write the random checkpoint a configuration names, `build/bench/checkpoints/<shape>`, if it is not there yet.

    It has an MTP layer too; one that was written without gets it. A configuration that cannot be read names none.
    """
    setting = read_command_line(engine_argv, _PROG, "", Faults()).get("model")
    path = Path(str(setting.value)) if setting is not None else Path()
    if path.parent != CHECKPOINT_DIR or path.name not in SHAPES:
        return
    missing = [part for part in (path, path / "mtp") if not part.exists()]
    if missing:
        progress = Progress(len(missing), f"writing a random checkpoint: {path.name}")
    if path in missing:
        make_checkpoint(path.name, path)
        progress.advance()
    if path / "mtp" in missing:
        add_mtp_layer(path)
        progress.advance()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        allow_abbrev=False,
        description="Measure prefill and decode speed in this process; of a method that drafts, beside plain decoding.",
        epilog="Every engine option is accepted too (--model, --quantization, --config FILE, ...).",
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="requests at once (default: 1 8 32)"
    )
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT_DIR, metavar="DIR", help="for the JSON records (default: %(default)s)"
    )
    return parser


def _with_naive(config: Config) -> list[Config]:
    """A method is only ever shown beside plain decoding, which comes first."""
    naive = replace(config, speculative=SpeculativeConfig())
    return [naive] if config.speculative.method == naive.speculative.method else [naive, config]


def _run_name(config: Config) -> str:
    model = Path(config.model.model).name
    return f"{model}-{config.model.quantization or config.model.dtype}-{config.speculative.label}"


def _verify_room(workload: Workload, engine: Engine, config: Config) -> None:
    """The batch must run as a whole, or the numbers would be those of queueing and preemption."""
    if min(workload.batch, workload.prompt_len) < 1 or workload.output_len < _MIN_OUTPUT_LEN:
        raise ConfigError(
            f"workload: expected batch and prompt_len >= 1 and output_len >= {_MIN_OUTPUT_LEN}, got {workload.batch},"
            f" {workload.prompt_len} and {workload.output_len}"
        )
    if workload.seed < 0:
        raise ConfigError(f"seed: expected at least 0, got {workload.seed}", param="seed")
    max_num_seqs = config.scheduler.max_num_seqs
    if workload.batch > max_num_seqs:
        raise ConfigError(
            f"max_num_seqs: expected at least the batch ({workload.batch}), got {max_num_seqs}", param="max_num_seqs"
        )
    length = workload.prompt_len + workload.output_len
    info = engine.model_info
    if length > info.max_model_len:
        raise ConfigError(f"max_model_len: expected at least {length} (prompt + output), got {info.max_model_len}")
    needed = workload.batch * -(-length // info.block_size)
    if needed > info.num_blocks:
        raise ConfigError(f"kv_cache_memory_gb: expected room for {needed} blocks, got {info.num_blocks}")


def _measure(engine: Engine, config: Config, workload: Workload, repeats: int, progress: Progress) -> Record:
    run_once(engine, Workload(workload.batch, workload.prompt_len, _WARM_UP_LEN, workload.seed), _WARM_UP_REPEAT)
    weight_bytes = _weight_bytes(config)
    samples, memory, results = [], [measure_memory()], []
    for repeat in range(repeats):
        samples.append(run_once(engine, workload, repeat))
        memory.append(measure_memory())
        results.append(_metrics([samples[-1]], workload, weight_bytes, memory[-2:]))
        progress.advance(f"batch {workload.batch}: {results[-1]['decode_tokens_per_s']:.1f} tokens/s")
    metrics = _metrics(samples, workload, weight_bytes, memory)
    for name in metrics.keys() - _TIMES:
        values = [result[name] for result in results if result[name] is not None]
        metrics[name] = median(values) if values else None
    repeat_rows = [
        result | {"memory_before": memory_json(memory[i]), "memory_after": memory_json(memory[i + 1])}
        for i, result in enumerate(results)
    ]
    return Record(
        kind="offline",
        name=f"{_run_name(config)}-b{workload.batch}",
        config=config_json(config),
        hardware=describe_hardware(),
        workload={
            "batch": workload.batch,
            "prompt_len": workload.prompt_len,
            "output_len": workload.output_len,
            "seed": workload.seed,
            "repeats": repeats,
        },
        metrics=metrics,
        repeats=repeat_rows,
    )


def _weight_bytes(config: Config) -> int | None:
    from fastdeploy_sd.checkpoint import Checkpoint
    from fastdeploy_sd.models.registry import read_decoder_config
    from fastdeploy_sd.quantization.scheme import QuantScheme

    decoder = read_decoder_config(Checkpoint(config.model.path).config)
    return weight_bytes_per_step(decoder, QuantScheme.create(config.model.dtype, config.model.quantization))


def _metrics(
    samples: Sequence[Sample], workload: Workload, weight_bytes: int | None, memory: Sequence[MemorySpeed]
) -> dict[str, Any]:
    """Return the metrics of some repeats together; rates are over all of them."""
    num_tokens = workload.batch * len(samples)
    steps_s = [t for s in samples for t in s.window_steps_s]
    step_s = median(steps_s)
    acceptance_rate, mean_output_len = _pooled_acceptance(samples)
    return {
        "ttft_ms": percentiles([t * 1e3 for s in samples for t in s.ttft_s]),
        "itl_ms": percentiles([t * 1e3 for s in samples for t in s.gaps_s]),
        "e2e_ms": percentiles([t * 1e3 for s in samples for t in s.e2e_s]),
        "step_ms": percentiles([t * 1e3 for t in steps_s]),
        "output_tokens_per_s": num_tokens * workload.output_len / sum(s.total_s for s in samples),
        "decode_tokens_per_s": sum(s.window_tokens for s in samples) / sum(steps_s),
        "prefill_tokens_per_s": num_tokens * workload.prompt_len / sum(s.prefill_s for s in samples),
        "acceptance_rate": acceptance_rate,
        "mean_output_len": mean_output_len,
        **_mean_phases([phase_ms(s.window_stats) for s in samples]),
        "weight_bytes_per_step": weight_bytes,
        "weights_gb_per_s": None if weight_bytes is None else weight_bytes / step_s / 1e9,
        "read_gb_per_s": mean(m.read_gb_per_s for m in memory),
        "core_latency_ns": mean(m.core_latency_ns for m in memory),
    }


def _pooled_acceptance(samples: Sequence[Sample]) -> tuple[float | None, float]:
    pairs = [acceptance(s.window_stats) for s in samples]
    rates = [rate for rate, _ in pairs if rate is not None]
    return (mean(rates) if rates else None), mean(length for _, length in pairs)


def _mean_phases(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: mean(p[name] for p in phases) for name in phases[0]}
