"""`bench http`: latency and throughput of a running server under load."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.command import OUTPUT_DIR, Command, Progress, markdown_table, show
from benchmarks.hardware import describe_hardware
from benchmarks.load_client import Load, LoadClient, Timing
from benchmarks.record import RANKS, Record, percentiles
from fastdeploy_sd.errors import ConfigError, Unavailable

_KEY_VARIABLE = "FDSD_API_KEY"
_CONCURRENCY = 8


def main(argv: Sequence[str]) -> int:
    """Run the command: write a record and print the metrics; 1 when a request failed."""
    args = _command().read(argv)
    if args.rate is not None and args.rate <= 0:
        raise ConfigError(f"rate: expected a positive number, got {args.rate}", param="rate")
    if args.rate is not None and args.concurrency is not None:
        raise ConfigError("concurrency: expected without --rate, got both", param="concurrency")
    load = Load(**{name: getattr(args, name) for name in Load.__dataclass_fields__})
    if load.rate is None and load.concurrency is None:
        load = replace(load, concurrency=_CONCURRENCY)
    model, config = find_server(args.url, args.api_key, args.model)
    progress = Progress(load.num_requests, "requests")
    client = LoadClient(args.url, model, args.api_key, load)
    timings = asyncio.run(client.run(progress.advance))
    record = Record(
        kind="http",
        name=args.name,
        config=config,
        hardware=describe_hardware(),
        workload=asdict(load),
        metrics=load_metrics(timings),
    )
    path = record.save(args.output)
    show(args, {"metrics": record.metrics}, metrics_table(record.metrics))
    print(f"record: {path}", file=sys.stderr)
    for error in sorted({t.error for t in timings if t.error is not None}):
        print(f"failed: {error}", file=sys.stderr)
    return 1 if record.metrics["num_failed"] else 0


def load_metrics(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return latencies of the complete requests and throughput; times in milliseconds.

    `ttft_ms` and `e2e_ms` count from when a request was due. `itl_ms` is between chunks with tokens, `tpot_ms` the mean
    time per token after a request's first. Throughput is over the time from the first request to the last end.
    """
    complete = [t for t in timings if t.error is None and t.event_times_s]
    num_tokens = sum(t.num_tokens for t in complete)
    duration_s = max((t.end_s for t in timings), default=0.0) - min((t.due_s for t in timings), default=0.0)
    gaps = [b - a for t in complete for a, b in pairwise(t.event_times_s)]
    tpot = [(t.event_times_s[-1] - t.event_times_s[0]) / (t.num_tokens - 1) for t in complete if t.num_tokens > 1]
    return {
        "ttft_ms": percentiles([(t.event_times_s[0] - t.due_s) * 1e3 for t in complete]),
        "itl_ms": percentiles([gap * 1e3 for gap in gaps]),
        "tpot_ms": percentiles([time * 1e3 for time in tpot]),
        "e2e_ms": percentiles([(t.end_s - t.due_s) * 1e3 for t in complete]),
        "output_tokens_per_s": num_tokens / duration_s if duration_s else None,
        "requests_per_s": len(complete) / duration_s if duration_s else None,
        "num_complete": len(complete),
        "num_failed": len(timings) - len(complete),
    }


def metrics_table(metrics: dict[str, Any]) -> str:
    """Return the metrics as a Markdown table."""
    rows = [
        [name, *(f"{value[f'p{rank}']:.1f}" for rank in RANKS)]
        if isinstance(value, dict)
        else [name, f"{value:.1f}" if isinstance(value, float) else value, "", ""]
        for name, value in metrics.items()
        if value is not None
    ]
    return markdown_table(["Metric", *(f"p{rank}" for rank in RANKS)], rows)


def _command() -> Command:
    command = Command("http", "Send streaming completions to a running server and time them.")
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    command.add_argument("--model", metavar="NAME", help="model name (default: the server's first)")
    command.add_argument("--api-key", metavar="KEY", default=os.environ.get(_KEY_VARIABLE), help="bearer token")
    command.number("--concurrency", None, f"requests in flight (default: {_CONCURRENCY}); not with --rate")
    command.add_argument("--rate", type=float, metavar="R", help="requests per second, arriving at random")
    command.number("--num-requests", 64)
    command.number("--prompt-len", 128, "tokens")
    command.number("--output-len", 128, "tokens")
    command.number("--vocab-size", 1000, "prompts are random ids below it")
    command.number("--seed", 0, "of prompts and arrivals", least=0)
    command.add_argument("--name", default="http", help="of the record's file (default: %(default)s)")
    command.folder(OUTPUT_DIR, "for the record")
    command.json()
    return command


def find_server(url: str, api_key: str | None, model: str | None) -> tuple[str, dict[str, Any]]:
    """Return the model's name and the server's configuration; {} from a server that does not tell it.

    Args:
        model: None = the server's first.

    Raises:
        ConfigError, Unavailable: there is no OpenAI-compatible server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers) as client:
            models = client.get("/v1/models").raise_for_status().json()["data"]
            answer = client.get("/config-info")
    except httpx.HTTPError as error:
        raise Unavailable(f"url: expected a running server, got {error} from {url}") from None
    except (httpx.InvalidURL, ValueError, KeyError) as error:
        raise ConfigError(f"url: expected an OpenAI-compatible server, got {error!r} from {url}") from None
    config = {name: entry["value"] for name, entry in answer.json().items()} if answer.is_success else {}
    return model or str(models[0]["id"]), config
