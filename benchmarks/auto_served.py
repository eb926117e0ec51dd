"""`bench auto --served`: a server that drafts beside one that does not, over HTTP, from idle to overload.

Both servers run all the time and take turns under the same requests: Poisson arrivals at a share of what the plain one
can do, a load that jumps, and a load beside a process that takes one core. What is compared is a turn with the turn
beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np

from benchmarks.checkpoint import ensure_checkpoint
from benchmarks.command import OUTPUT_DIR, Command, table_of
from benchmarks.configurations import METHODS
from benchmarks.hardware import describe_hardware
from benchmarks.load import load_metrics
from benchmarks.load_client import Load, LoadClient, Timing
from benchmarks.processes import running_server
from benchmarks.progress import Progress
from benchmarks.prompts import WORKLOADS, make_prompts
from benchmarks.record import Record, config_json
from fastdeploy_sd.config import Config, load_config
from fastdeploy_sd.errors import ConfigError, Unavailable
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import draft_methods
from fastdeploy_sd.types.draft_methods import NAIVE

KIND = "auto-served"
_SETTING = next(method.name for method in draft_methods.METHODS.values() if method.chooses)
_LOADS = (20, 50, 80, 100, 120, 150)
_JUMPS = (0.2, 1.2)
_NEIGHBOUR_LOAD = 0.5
_NUM_PROMPTS = 64
_BUSY = "while True: pass"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is sent in a turn.

    Attributes:
        shares: of the plain server's capacity, one after the other, each for as long as the next.
        has_neighbour: whether another process takes a core meanwhile.
    """

    name: str
    shares: Sequence[float]
    has_neighbour: bool = False

    def due_times_s(self, capacity: float, seconds: float, seed: int) -> list[float]:
        """Return when requests are due: Poisson arrivals at each share of `capacity` requests per second in turn.

        Args:
            seconds: of all shares together. There is a request at the beginning, whatever the rate.
        """
        rng, part_s = np.random.default_rng(seed), seconds / len(self.shares)
        times = [0.0]
        for i, share in enumerate(self.shares):
            now = i * part_s
            while (now := now + rng.exponential(1 / (share * capacity))) < (i + 1) * part_s:
                times.append(now)
        return times


def main(argv: Sequence[str]) -> int:
    """Run the command: write a record per scenario and print their table; 1 when a request failed."""
    command = Command(
        "auto --served",
        "Compare a server that drafts with one that does not over HTTP, in turns, from idle to overload.",
        "the servers' (--model, --max-num-seqs, --num-threads, ...)",
    )
    command.some("--setting", METHODS, f"the method (default: {_SETTING})", (_SETTING,))
    command.number("--drafts", None, "per request and step at most (default: the method's)")
    command.number("--loads", _LOADS, "percent of what the plain server can do")
    command.number("--seconds", 20, "of a turn, and of a jump")
    command.number("--output-len", 96, "tokens")
    command.number("--concurrency", 32, "requests at once where capacity is measured")
    command.some("--workloads", WORKLOADS, "of the prompts, mixed (default: all)", WORKLOADS)
    command.number("--repeats", 2)
    command.number("--seed", 0, "of prompts and arrivals", least=0)
    command.folder(OUTPUT_DIR / "auto-served")
    args = command.read(argv)
    if len(args.setting) > 1:
        raise ConfigError(f"setting: expected one method, got {', '.join(args.setting)}", param="setting")
    ensure_checkpoint(args.others)
    config = load_config(args.others, command.prog)
    scenarios = [Scenario(f"{percent} %", (percent / 100,)) for percent in args.loads]
    scenarios += [Scenario("jumping", _JUMPS * 2), Scenario("neighbour", (_NEIGHBOUR_LOAD,), has_neighbour=True)]
    with _servers(args) as urls:
        records = _measure(urls, scenarios, config, args)
    print(served_table(records))
    return 1 if any(record.metrics["num_failed"] for record in records) else 0


@contextmanager
def _servers(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """A plain server and one that drafts; yields their URLs."""
    keys = dict(METHODS[args.setting[0]])
    if args.drafts is not None:
        keys["num_speculative_tokens"] = args.drafts
    options = {NAIVE: {"method": NAIVE}, args.setting[0]: keys}
    with ExitStack() as stack:
        urls = {}
        for name, speculative in options.items():
            more = ["--speculative-config", json.dumps(speculative)]
            (host, port), _ = stack.enter_context(running_server([*args.others, *more]))
            urls[name] = f"http://{host}:{port}"
        yield urls


def _measure(
    urls: Mapping[str, str], scenarios: Sequence[Scenario], config: Config, args: argparse.Namespace
) -> list[Record]:
    encoder = PromptEncoder(load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend))
    each = -(-_NUM_PROMPTS // len(args.workloads))
    made = [make_prompts(workload, each, encoder, args.seed) for workload in args.workloads]
    prompts = [prompt.tolist() for together in zip(*made, strict=True) for prompt in together]
    model = config.model.served_name

    def send(server: str, due_times_s: Sequence[float] | None, seed: int) -> list[Timing]:
        count = 2 * args.concurrency if due_times_s is None else len(due_times_s)
        load = Load(count, 0, args.output_len, args.concurrency if due_times_s is None else None)
        turn = cycle([*prompts[seed % len(prompts) :], *prompts[: seed % len(prompts)]])
        client = LoadClient(urls[server], model, None, load, [next(turn) for _ in range(count)], due_times_s)
        return asyncio.run(client.run(lambda: None))

    for server in urls:  # the first requests pay for what is only made once
        send(server, None, 0)
    capacity = load_metrics(send(NAIVE, None, 1))["requests_per_s"]
    if not capacity:
        raise Unavailable("server: expected requests that succeed, got none")
    progress, records = Progress(len(scenarios) * args.repeats * len(urls), "served"), []
    for scenario in scenarios:
        turns: list[dict[str, dict[str, Any]]] = []
        for repeat in range(args.repeats):
            seconds = args.seconds * len(scenario.shares)
            due_times_s = scenario.due_times_s(capacity, seconds, args.seed + repeat)
            turn = {}
            for server in list(urls)[:: -1 if repeat % 2 else 1]:
                with _neighbour(scenario.has_neighbour):
                    turn[server] = load_metrics(send(server, due_times_s, args.seed + repeat))
                progress.advance(f"{scenario.name} {server}")
            turns.append(turn)
        record = Record(
            kind=KIND,
            name=f"{config.model.model.rsplit('/', 1)[-1]}-{args.setting[0]}-{scenario.name.replace(' %', '')}",
            config=config_json(config),
            hardware=describe_hardware(),
            workload={"scenario": scenario.name, "setting": args.setting[0], "capacity_requests_per_s": capacity}
            | {"shares": list(scenario.shares), "seconds": args.seconds, "output_len": args.output_len},
            metrics=served_metrics(turns, args.setting[0]),
            repeats=[dict(turn) for turn in turns],
        )
        record.save(args.output)
        records.append(record)
    return records


@contextmanager
def _neighbour(is_there: bool) -> Iterator[None]:
    """A process that takes one core until the end of the block."""
    if not is_there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# What is compared -> (where it is in a turn's metrics, whether more is better).
_COMPARED: Mapping[str, tuple[Callable[[dict[str, Any]], float | None], bool]] = {
    "output_tokens_per_s": (lambda m: m["output_tokens_per_s"], True),
    "tpot_p50": (lambda m: None if m["tpot_ms"] is None else m["tpot_ms"]["p50"], False),
    "tpot_p99": (lambda m: None if m["tpot_ms"] is None else m["tpot_ms"]["p99"], False),
    "ttft_p50": (lambda m: None if m["ttft_ms"] is None else m["ttft_ms"]["p50"], False),
    "e2e_p50": (lambda m: None if m["e2e_ms"] is None else m["e2e_ms"]["p50"], False),
}


def served_metrics(turns: Sequence[Mapping[str, dict[str, Any]]], setting: str) -> dict[str, Any]:
    """Return how much better a setting is than plain decoding: of every number, the median of the turns' ratios.

    A ratio above 1 is better: more tokens per second, or less time. `plain` and `drafting` are the medians themselves.
    """
    found: dict[str, Any] = {"num_failed": sum(m["num_failed"] for turn in turns for m in turn.values())}
    for name, (number, is_more_better) in _COMPARED.items():
        pairs = [(number(turn[NAIVE]), number(turn[setting])) for turn in turns]
        complete = [(plain, drafting) for plain, drafting in pairs if plain and drafting]
        ratios = [drafting / plain if is_more_better else plain / drafting for plain, drafting in complete]
        found[name] = {
            "ratio": median(ratios) if ratios else None,
            "plain": median(plain for plain, _ in complete) if complete else None,
            "drafting": median(drafting for _, drafting in complete) if complete else None,
        }
    return found


def served_table(records: Sequence[Record]) -> str:
    """Return the records as Markdown: of every number plain decoding's, and the ratio; above 1 is better."""

    def cell(name: str) -> Callable[[Record], str]:
        return lambda r: (
            "-"
            if r.metrics[name]["ratio"] is None
            else f"{r.metrics[name]['plain']:.1f}, {r.metrics[name]['ratio']:.2f}x"
        )

    return table_of(
        records,
        {
            "Load": "{0.workload[scenario]}",
            "Setting": "{0.workload[setting]}",
            "Tokens/s": cell("output_tokens_per_s"),
            "Time per token p50, ms": cell("tpot_p50"),
            "p99": cell("tpot_p99"),
            "First token p50, ms": cell("ttft_p50"),
            "Whole request p50, ms": cell("e2e_p50"),
            "Failed": "{0.metrics[num_failed]}",
        },
    )
