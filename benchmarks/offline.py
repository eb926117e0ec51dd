"""`bench offline`: prefill and decode speed of a configuration in this process, for several batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.checkpoint import ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command, Progress, show, table_of
from benchmarks.configurations import without_cache_file
from benchmarks.engines import running_engine, verify_room, weight_bytes
from benchmarks.hardware import MemorySpeed, describe_hardware, measure_memory, memory_json
from benchmarks.offline_run import Sample, Workload, mean_window, run_once
from benchmarks.record import Record, config_json, percentiles
from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE

_WARM_UP_LEN = 4
# Repeat numbers below this are measured; the warm-up's prompts must differ from theirs.
_WARM_UP_REPEAT = 1 << 20
_MIN_OUTPUT_LEN = 2
# Time is per repeat as {p50, ..}; everything else of a record's metrics is one number.
_TIMES = ("ttft_ms", "itl_ms", "e2e_ms", "step_ms")


def main(argv: Sequence[str]) -> int:
    """Run the command, write one record per batch size, print their table.

    A configuration that drafts is measured after plain decoding of the same configuration, which is in the table too.
    """
    text = "Measure prefill and decode speed in this process; a method that drafts is compared with plain decoding."
    command = Command("offline", text, "the engine's (--model, --quantization, --config FILE, ...)")
    command.number("--batch", (1, 8, 32), "requests at once")
    command.number("--prompt-len", 128, "tokens")
    command.number("--output-len", 128, "tokens", least=_MIN_OUTPUT_LEN)
    command.number("--repeats", 3)
    command.number("--seed", 0, "of the prompts", least=0)
    command.folder(OUTPUT_DIR)
    command.json()
    args = command.read(argv)
    ensure_checkpoint(args.others)
    config = load_config(args.others, command.prog)
    workloads = [Workload(batch, args.prompt_len, args.output_len, args.seed) for batch in args.batch]
    records = []
    for measured in _with_naive(without_cache_file(config)):
        for record in run_offline(measured, workloads, args.repeats):
            record.save(args.output)
            records.append(record)
    show(args, {"records": records}, results_table(records))
    return 0


def run_offline(config: Config, workloads: Sequence[Workload], repeats: int) -> list[Record]:
    """Load the model once and measure every workload.

    Raises:
        ConfigError: a workload does not fit into the configuration as a whole.
    """
    with running_engine(config) as engine:
        for workload in workloads:
            verify_room(engine, config, workload.batch, workload.prompt_len + workload.output_len)
        progress = Progress(len(workloads) * repeats, _run_name(config))
        return [_measure(engine, config, workload, repeats, progress) for workload in workloads]


def _with_naive(config: Config) -> list[Config]:
    """Put plain decoding first: what every method is compared with."""
    naive = replace(config, speculative=SpeculativeConfig())
    return [naive] if config.speculative.method == naive.speculative.method else [naive, config]


def _run_name(config: Config) -> str:
    model = Path(config.model.model).name
    return f"{model}-{config.model.quantization or config.model.dtype}-{config.speculative.label}"


def _measure(engine: Engine, config: Config, workload: Workload, repeats: int, progress: Progress) -> Record:
    run_once(engine, replace(workload, output_len=_WARM_UP_LEN), _WARM_UP_REPEAT)
    num_bytes, samples, memory, results = weight_bytes(config), [], [measure_memory()], []
    for repeat in range(repeats):
        samples.append(run_once(engine, workload, repeat))
        memory.append(measure_memory())
        results.append(offline_metrics([samples[-1]], workload, num_bytes, memory[-2:]))
        progress.advance(f"batch {workload.batch}: {results[-1]['decode_tokens_per_s']:.1f} tokens/s")
    metrics = offline_metrics(samples, workload, num_bytes, memory)
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
        workload={**asdict(workload), "repeats": repeats},
        metrics=metrics,
        repeats=repeat_rows,
    )


def offline_metrics(
    samples: Sequence[Sample], workload: Workload, num_bytes: int | None, memory: Sequence[MemorySpeed]
) -> dict[str, Any]:
    """Return the metrics of some repeats together; rates are over all of them."""
    num_tokens = workload.batch * len(samples)
    steps_s = [t for s in samples for t in s.window_steps_s]
    step_s = median(steps_s)
    return {
        "ttft_ms": percentiles([t * 1e3 for s in samples for t in s.ttft_s]),
        "itl_ms": percentiles([t * 1e3 for s in samples for t in s.gaps_s]),
        "e2e_ms": percentiles([t * 1e3 for s in samples for t in s.e2e_s]),
        "step_ms": percentiles([t * 1e3 for t in steps_s]),
        "output_tokens_per_s": num_tokens * workload.output_len / sum(s.total_s for s in samples),
        "decode_tokens_per_s": sum(s.window_tokens for s in samples) / sum(steps_s),
        "prefill_tokens_per_s": num_tokens * workload.prompt_len / sum(s.prefill_s for s in samples),
        **mean_window(samples, length_name="mean_output_len"),
        "weight_bytes_per_step": num_bytes,
        "weights_gb_per_s": None if num_bytes is None else num_bytes / step_s / 1e9,
        "read_gb_per_s": mean(m.read_gb_per_s for m in memory),
        "core_latency_ns": mean(m.core_latency_ns for m in memory),
    }


def results_table(records: Sequence[Record]) -> str:
    """Return offline records as a Markdown table, ordered by model, weights, batch and method.

    "vs naive" divides by the record of plain decoding with the same model, weights and workload; "-" without one.
    """
    offline = sorted((r for r in records if r.kind == "offline"), key=_order)
    rates = {_same_but_method(r): r.metrics["decode_tokens_per_s"] for r in offline if _method(r) == NAIVE}

    def versus_naive(record: Record) -> str | None:
        naive = rates.get(_same_but_method(record))
        return None if naive is None else f"{record.metrics['decode_tokens_per_s'] / naive:.2f}x"

    def share(record: Record) -> str | None:
        streamed, readable = record.metrics["weights_gb_per_s"], record.metrics["read_gb_per_s"]
        return None if streamed is None else f"{streamed / readable:.0%}"

    columns: dict[str, str | Callable[[Record], object]] = {
        "Model": _model,
        "Weights": "{0.weights}",
        "Batch": "{0.workload[batch]}",
        "Method": _method,
        "Decode tokens/s": "{0.metrics[decode_tokens_per_s]:.1f}",
        "vs naive": versus_naive,
        "Tokens per step": "{0.metrics[mean_output_len]:.2f}",
        "Step ms": "{0.metrics[step_ms][p50]:.2f}",
        "TTFT ms": "{0.metrics[ttft_ms][p50]:.0f}",
        "Prefill tokens/s": "{0.metrics[prefill_tokens_per_s]:.0f}",
        "Weights GB/s": "{0.metrics[weights_gb_per_s]:.1f}",
        "Memory GB/s": "{0.metrics[read_gb_per_s]:.1f}",
        "Share": share,
    }
    return table_of(offline, columns)


def _method(record: Record) -> str:
    """The method; what extends MTP's drafts is a part of its name."""
    speculative = record.config["speculative_config"]
    name = str(speculative["method"])
    extensions = METHODS[name].extensions if name in METHODS else {}
    return "-".join([name, *(e for strategy, e in extensions.items() if strategy == speculative.get("mtp_strategy"))])


def _model(record: Record) -> str:
    return Path(record.config["model"]).name


def _order(record: Record) -> tuple[object, ...]:
    formats = ("float32", "bfloat16", "wint8", "wint4")
    method = _method(record)
    rank = formats.index(record.weights) if record.weights in formats else len(formats)
    return _model(record), rank, record.weights, record.workload["batch"], method != NAIVE, method


def _same_but_method(record: Record) -> tuple[object, ...]:
    work = record.workload
    return _model(record), record.weights, work["batch"], work["prompt_len"], work["output_len"]
