"""`bench prefill-decode`: one prefill and one decode instance beside one mixed instance on as many cores.

Both deployments run all the time, each behind a router of its own, and take turns round by round. In a round requests
of one token come one after the other: the prefill instance's help costs them a hand-over. Then streams decode, and when
all of them have begun, prompts arrive all at once: the mixed instance computes them in the steps of its streams, the
decode instance does not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from statistics import median

from benchmarks.checkpoint import CHECKPOINT_DIR, ensure_checkpoint
from benchmarks.command import Command, show, table_of, with_default
from benchmarks.hardware import describe_hardware
from benchmarks.load import find_server
from benchmarks.load_client import Load, LoadClient, Timing
from benchmarks.percentiles import Percentiles, percentiles
from benchmarks.processes import Address, get, running_router, running_server, wait_for_instances
from benchmarks.progress import Progress
from fastdeploy_sd.errors import Unavailable

MIXED, APART = "mixed", "1P1D"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a round sends.

    Attributes:
        num_singles: requests of one token, one after the other.
        prompt_len: tokens of those and of the burst's prompts.
        num_streams, output_len: streams, and tokens of each.
        num_burst: prompts that arrive at once. burst_prompt_len: their tokens, 0 = as `prompt_len`.
    """

    num_singles: int
    prompt_len: int
    num_streams: int
    output_len: int
    num_burst: int
    burst_prompt_len: int = 0


@dataclass(slots=True)
class Times:
    """What the rounds of a deployment took, in milliseconds.

    Attributes:
        first: until the token of a request that is alone.
        alone, beside: between two tokens of a stream, without and during a burst.
        burst: until the first token of a prompt of the burst.
    """

    first: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeploymentCost:
    """The percentiles of `Times`; None of nothing, where streams ended too soon.

    Attributes:
        added_ms: to the first token of a request that is alone, against the mixed instance; the medians' difference.
        num_handed_over: prompts whose KV came from another instance.
    """

    deployment: str
    num_handed_over: int
    added_ms: float
    first: Percentiles | None
    alone: Percentiles | None
    beside: Percentiles | None
    burst: Percentiles | None


_STREAM_PROMPT_LEN = 64
# Of the streams' tokens, before the burst begins.
_SHARE_BEFORE = 0.25
_ROUND_S = 300.0
_KV_GB = 1
_RECEIVED = 'fastdeploy_sd:kv_transfers_total{direction="received"'


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    text = "Measure a prefill and a decode instance beside a mixed one on as many cores."
    command = Command("prefill-decode", text, "the servers' (default: Qwen3-0.6B's shape)")
    command.number("--threads", max(len(os.sched_getaffinity(0)) // 2, 1), "of P and of D; the mixed one has both's")
    command.number("--singles", 3, "requests of one token, per round")
    command.number("--prompt-len", 512, "tokens of their prompts and of the burst's")
    command.number("--streams", 4)
    command.number("--output-len", 160, "tokens of a stream")
    command.number("--burst", 3, "prompts at once")
    command.number("--rounds", 3)
    command.json()
    args = command.read(argv)
    options = with_default(args.others, "--model", CHECKPOINT_DIR / "qwen3-0.6b")
    options = with_default(options, "--kv-cache-memory-gb", _KV_GB)
    options = with_default(options, "--speculative-config", "naive")
    ensure_checkpoint(options)
    sizes = Sizes(args.singles, args.prompt_len, args.streams, args.output_len, args.burst)
    with ExitStack() as stack:
        deployments = {
            MIXED: stack.enter_context(_deployment([("mixed", 2 * args.threads)], options)),
            APART: stack.enter_context(_deployment([("prefill", args.threads), ("decode", args.threads)], options)),
        }
        times = measure({name: found.router for name, found in deployments.items()}, sizes, args.rounds)
        costs = deployment_costs(times, {name: found.num_handed_over() for name, found in deployments.items()})
    hardware = describe_hardware()
    hardware["num_threads"] = 2 * args.threads
    record = {"hardware": hardware, "sizes": sizes, "deployments": costs}
    show(args, record, f"{hardware['cpu']}; milliseconds\n\n{_table(costs)}")
    return 0


@dataclass(frozen=True, slots=True)
class _Deployment:
    """Where a router and its instances serve."""

    router: Address
    instances: tuple[Address, ...]

    def num_handed_over(self) -> int:
        """Prompts whose KV one instance has received from another."""
        lines = [line for address in self.instances for line in get(address, "/metrics").splitlines()]
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(_RECEIVED))


@contextmanager
def _deployment(instances: Sequence[tuple[str, int]], options: Sequence[str]) -> Iterator[_Deployment]:
    """Run instances of these roles and numbers of threads behind a router."""
    with ExitStack() as stack:
        router, _ = stack.enter_context(running_router())
        addresses = []
        for role, num_threads in instances:
            place = [f"--router={router[0]}:{router[1]}", "--splitwise-role", role, "--num-threads", str(num_threads)]
            address, _ = stack.enter_context(running_server([*options, *place]))
            addresses.append(address)
        wait_for_instances(router, len(instances))
        yield _Deployment(router, tuple(addresses))


def measure(routers: dict[str, Address], sizes: Sizes, num_rounds: int) -> dict[str, Times]:
    """Run the rounds, after one that is not counted.

    Raises:
        Unavailable: a request failed.
    """
    times = {name: Times() for name in routers}
    progress = Progress((num_rounds + 1) * len(routers), "prefill-decode")
    for turn in range(num_rounds + 1):
        for name, (host, port) in routers.items():
            found = asyncio.run(_round(f"http://{host}:{port}", sizes, seed=turn))
            if turn > 0:
                for kind in Times.__slots__:
                    getattr(times[name], kind).extend(getattr(found, kind))
            progress.advance(name)
    return times


async def _round(url: str, sizes: Sizes, seed: int) -> Times:
    try:
        async with asyncio.timeout(_ROUND_S):
            model, _ = find_server(url, None, None)
            singles = Load(sizes.num_singles, sizes.prompt_len, 1, concurrency=1, seed=3 * seed)
            times = Times(first=_first_ms(await _run(LoadClient(url, model, None, singles))))
            await _streams_and_burst(url, model, sizes, seed, times)
            return times
    except TimeoutError:
        raise Unavailable(f"round: expected its end within {_ROUND_S} s, got none") from None


async def _streams_and_burst(url: str, model: str, sizes: Sizes, seed: int, times: Times) -> None:
    num_streams, wanted = sizes.num_streams, sizes.num_streams * sizes.output_len * _SHARE_BEFORE
    load = Load(num_streams, _STREAM_PROMPT_LEN, sizes.output_len, concurrency=num_streams, seed=3 * seed + 1)
    under_way, num_events = asyncio.Event(), count(1)

    def on_event() -> None:
        if next(num_events) >= wanted:
            under_way.set()

    client = LoadClient(url, model, None, load)
    streams = asyncio.create_task(_run(client, on_event))
    waiting = asyncio.create_task(under_way.wait())
    await asyncio.wait((streams, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    burst_len = sizes.burst_prompt_len or sizes.prompt_len
    burst = Load(sizes.num_burst, burst_len, 1, concurrency=sizes.num_burst, seed=3 * seed + 2)
    begin = time.perf_counter()
    times.burst += _first_ms(await _run(LoadClient(url, model, None, burst)))
    end = time.perf_counter()
    for timing in await streams:
        for before, after in pairwise(client.start_s + event_s for event_s in timing.event_times_s):
            is_beside = after > begin and before < end
            (times.beside if is_beside else times.alone).append((after - before) * 1e3)


async def _run(client: LoadClient, on_event: Callable[[], None] = lambda: None) -> list[Timing]:
    """Raises Unavailable if a request failed."""
    timings = await client.run(lambda: None, on_event)
    for timing in timings:
        if timing.error is not None:
            raise Unavailable(f"request: expected its tokens, got {timing.error}")
    return timings


def _first_ms(timings: Sequence[Timing]) -> list[float]:
    return [(timing.event_times_s[0] - timing.due_s) * 1e3 for timing in timings]


def deployment_costs(times: dict[str, Times], num_handed_over: dict[str, int]) -> list[DeploymentCost]:
    """Return the percentiles of every deployment; the first one is what the others' first tokens are compared with."""
    reference = median(next(iter(times.values())).first)
    return [
        DeploymentCost(
            name,
            num_handed_over[name],
            added_ms=median(found.first) - reference,
            **{kind: percentiles(getattr(found, kind)) for kind in Times.__slots__},
        )
        for name, found in times.items()
    ]


def _cell(kind: str, rank: int) -> Callable[[DeploymentCost], object]:
    def show_ms(cost: DeploymentCost) -> object:
        found: Percentiles | None = getattr(cost, kind)
        return None if found is None else f"{found[f'p{rank}']:.1f}"

    return show_ms


def _table(costs: Sequence[DeploymentCost]) -> str:
    columns: dict[str, str | Callable[[DeploymentCost], object]] = {"Deployment": "{0.deployment}"}
    headings = {"TTFT": "first", "ITL": "alone", "ITL in a burst": "beside", "TTFT in a burst": "burst"}
    for heading, kind in headings.items():
        for rank in (50, 99):
            columns[f"{heading}, p{rank}"] = _cell(kind, rank)
    columns |= {"TTFT added": "{0.added_ms:.1f}", "Handed over": "{0.num_handed_over}"}
    return table_of(costs, columns)
