"""Tables from records: the one of docs/laboratory.md, and the comparison of two runs with a noise estimate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_sd.bench.percentiles import spread
from fastdeploy_sd.bench.record import Record, load_record, load_records
from fastdeploy_sd.errors import ConfigError

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_NAIVE = "naive"
_COLUMNS = (
    "Model",
    "Weights",
    "Batch",
    "Method",
    "Decode tokens/s",
    "vs naive",
    "Tokens per step",
    "Step ms",
    "TTFT ms",
    "Prefill tokens/s",
    "Weights GB/s",
    "Memory GB/s",
    "Share",
)


def table_command(argv: Sequence[str]) -> int:
    """`bench table`: print the table of a folder of records, or put it into a document.

    Raises:
        ConfigError: no records, or the document has no place for the table.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench table", allow_abbrev=False, description="Print records as a Markdown table."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of JSON records")
    parser.add_argument("--update", type=Path, metavar="FILE", help=f"replace what is between {BEGIN} and {END}")
    args = parser.parse_args(argv)
    table = results_table(load_records(args.folder))
    if args.update is None:
        print(table)
    else:
        update_document(args.update, table)
    return 0


def compare_command(argv: Sequence[str]) -> int:
    """`bench compare`: print how two records differ.

    Raises:
        ConfigError: a file is no record.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench compare",
        allow_abbrev=False,
        description="Print the change of every metric between two records, against the noise of their repeats.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="JSON record")
    parser.add_argument("after", type=Path, metavar="AFTER", help="JSON record")
    args = parser.parse_args(argv)
    print(comparison(load_record(args.before), load_record(args.after)))
    return 0


def results_table(records: Sequence[Record]) -> str:
    """Return offline records as a Markdown table, ordered by model, weights, batch and method.

    "vs naive" divides by the record of plain decoding with the same model, weights and workload; "-" without one.
    """
    offline = sorted((r for r in records if r.kind == "offline"), key=_order)
    naive = {_same_but_method(r): r for r in offline if _method(r) == _NAIVE}
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_cells(r, naive.get(_same_but_method(r)))) + " |" for r in offline]
    return "\n".join(lines)


def comparison(before: Record, after: Record) -> str:
    """Return a Markdown table of the metrics both records have: values, change, and noise.

    Noise is the larger spread of the two records' repeats, (max - min) / median; a change within it is marked "noise".
    """
    lines = ["| Metric | Before | After | Change | Noise | |", "|---|---|---|---|---|---|"]
    for name, old, new in _common_metrics(before, after):
        change = new / old - 1 if old else 0.0
        noise = max(_noise(before, name), _noise(after, name))
        verdict = "noise" if abs(change) <= noise else "faster" if (change > 0) == _is_rate(name) else "slower"
        lines.append(f"| {name} | {old:.2f} | {new:.2f} | {change:+.1%} | {noise:.1%} | {verdict} |")
    return "\n".join(lines)


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
    strategy = str(speculative.get("mtp_strategy", "default"))
    return str(speculative["method"]) + ("" if strategy == "default" else strategy.replace("with_", "-"))


def _model(record: Record) -> str:
    return Path(record.config["model"]).name


def _order(record: Record) -> tuple[object, ...]:
    formats = ("float32", "bfloat16", "wint8", "wint4")
    method = _method(record)
    rank = formats.index(record.weights) if record.weights in formats else len(formats)
    return _model(record), rank, record.weights, record.workload["batch"], method != _NAIVE, method


def _same_but_method(record: Record) -> tuple[object, ...]:
    work = record.workload
    return _model(record), record.weights, work["batch"], work["prompt_len"], work["output_len"]


def _cells(record: Record, naive: Record | None) -> list[str]:
    m = record.metrics
    rate = m["decode_tokens_per_s"]
    streamed, readable = m["weights_gb_per_s"], m["read_gb_per_s"]
    return [
        _model(record),
        record.weights,
        str(record.workload["batch"]),
        _method(record),
        f"{rate:.1f}",
        "-" if naive is None else f"{rate / naive.metrics['decode_tokens_per_s']:.2f}x",
        f"{m['mean_output_len']:.2f}",
        f"{m['step_ms']['p50']:.2f}",
        f"{m['ttft_ms']['p50']:.0f}",
        f"{m['prefill_tokens_per_s']:.0f}",
        "-" if streamed is None else f"{streamed:.1f}",
        f"{readable:.1f}",
        "-" if streamed is None else f"{streamed / readable:.0%}",
    ]


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
