"""Tables from records: the one of docs/laboratory.md, and the comparison of two runs with a noise estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Command, markdown_table, table_of
from benchmarks.percentiles import spread
from benchmarks.record import Record
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def table_command(argv: Sequence[str]) -> int:
    """`bench table`: print the table of a folder of records, or put it into a document."""
    command = Command("table", "Print records as a Markdown table.")
    command.add_argument("folder", type=Path, metavar="DIR", help="folder of JSON records")
    command.add_argument("--update", type=Path, metavar="FILE", help=f"replace what is between {BEGIN} and {END}")
    args = command.read(argv)
    table = results_table(Record.load_all(args.folder))
    if args.update is None:
        print(table)
    else:
        update_document(args.update, table)
    return 0


def compare_command(argv: Sequence[str]) -> int:
    """`bench compare`: print how two records differ."""
    text = "Print the change of every metric between two records, against the noise of their repeats."
    command = Command("compare", text)
    command.add_argument("before", type=Path, metavar="BEFORE", help="JSON record")
    command.add_argument("after", type=Path, metavar="AFTER", help="JSON record")
    args = command.read(argv)
    print(comparison(Record.load(args.before), Record.load(args.after)))
    return 0


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


def comparison(before: Record, after: Record) -> str:
    """Return a Markdown table of the metrics both records have: values, change, and noise.

    Noise is the larger spread of the two records' repeats, (max - min) / median; a change within it is marked "noise".
    """
    rows = []
    for name, old, new in _common_metrics(before, after):
        change = new / old - 1 if old else 0.0
        noise = max(_noise(before, name), _noise(after, name))
        verdict = "noise" if abs(change) <= noise else "faster" if (change > 0) == _is_rate(name) else "slower"
        rows.append([name, f"{old:.2f}", f"{new:.2f}", f"{change:+.1%}", f"{noise:.1%}", verdict])
    return markdown_table(["Metric", "Before", "After", "Change", "Noise", ""], rows)


def update_document(path: Path, table: str) -> None:
    """Replace the text between the two marks.

    Raises:
        ConfigError: the document cannot be read, or lacks a mark.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"update: expected a document, got {path} ({error.strerror})") from None
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"update: expected {BEGIN} and {END} in {path}, got a document without them")
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


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


def _common_metrics(before: Record, after: Record) -> list[tuple[str, float, float]]:
    old, new = _flat(before.metrics), _flat(after.metrics)
    return [(name, old[name], new[name]) for name in old if name in new]


def _flat(metrics: dict[str, Any]) -> dict[str, float]:
    """Numbers by name; a metric with percentiles becomes "name.p50" and so on, an absent one disappears."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{rank}": float(v) for rank, v in value.items()}
        elif value is not None:
            flat[name] = float(value)
    return flat


def _noise(record: Record, name: str) -> float:
    return spread([flat[name] for flat in map(_flat, record.repeats) if name in flat])


def _is_rate(name: str) -> bool:
    """Whether more is better: everything but times."""
    return "_ms" not in name and "_ns" not in name
