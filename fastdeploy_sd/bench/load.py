"""`bench http`: latency and throughput of a running server under load."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from fastdeploy_sd.bench.hardware import describe_hardware
from fastdeploy_sd.bench.load_client import Load, LoadClient, Timing
from fastdeploy_sd.bench.percentiles import percentiles
from fastdeploy_sd.bench.progress import Progress
from fastdeploy_sd.bench.record import Record
from fastdeploy_sd.errors import ConfigError, Unavailable

_KEY_VARIABLE = "FDSD_API_KEY"


def main(argv: Sequence[str]) -> int:
    """Run the command: write a record and print the metrics; 1 when a request failed.

    Raises:
        ConfigError: the options make no sense.
        Unavailable: no server answers at the URL.
    """
    args = _parser().parse_args(argv)
    load = _load(args)
    model, config = _server(args.url, args.api_key, args.model)
    progress = Progress(load.num_requests, "requests")
    client = LoadClient(args.url, model, args.api_key, load)
    timings = asyncio.run(client.run(progress.advance))
    record = Record(
        kind="http",
        name=args.name,
        config=config,
        hardware=describe_hardware(),
        workload=_workload(load),
        metrics=load_metrics(timings),
        repeats=[],
    )
    path = record.save(args.output)
    print(metrics_table(record.metrics))
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
    lines = ["| Metric | p50 | p90 | p99 |", "|---|---|---|---|"]
    for name, value in metrics.items():
        if isinstance(value, dict):
            lines.append(f"| {name} | {value['p50']:.1f} | {value['p90']:.1f} | {value['p99']:.1f} |")
        elif value is not None:
            lines.append(f"| {name} | {value:.1f} | | |" if isinstance(value, float) else f"| {name} | {value} | | |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastdeploy_sd.bench http",
        allow_abbrev=False,
        description="Send streaming completions to a running server and time them.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="model name (default: the server's first)")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get(_KEY_VARIABLE), help="bearer token")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, metavar="N", help="requests in flight (default: 8)")
    loop.add_argument("--rate", type=float, metavar="R", help="requests per second, arriving at random")
    parser.add_argument("--num-requests", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=1000, metavar="N", help="prompts are random ids below it")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    parser.add_argument("--name", default="http", help="of the record's file (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build", "bench"), metavar="DIR", help="for the record")
    return parser


def _load(args: argparse.Namespace) -> Load:
    counts = ("num_requests", "prompt_len", "output_len", "vocab_size")
    for name in counts:
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}: expected at least 1, got {getattr(args, name)}", param=name)
    if args.rate is not None and args.rate <= 0:
        raise ConfigError(f"rate: expected a positive number, got {args.rate}", param="rate")
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"concurrency: expected at least 1, got {args.concurrency}", param="concurrency")
    if args.seed < 0:
        raise ConfigError(f"seed: expected at least 0, got {args.seed}", param="seed")
    concurrency = args.concurrency or (8 if args.rate is None else None)
    return Load(
        concurrency=concurrency, rate=args.rate, seed=args.seed, **{name: getattr(args, name) for name in counts}
    )


def _workload(load: Load) -> dict[str, Any]:
    return {name: getattr(load, name) for name in Load.__dataclass_fields__}


def _server(url: str, api_key: str | None, model: str | None) -> tuple[str, dict[str, Any]]:
    """Return the model's name and the server's configuration; {} from a server that does not tell it."""
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
