"""`bench cluster`: what a deployment of some size would do, simulated with the product's router and engines."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cluster.deployment import Deployment, Faults
from benchmarks.cluster.engines import BLOCK_SIZE, EngineShape, LinearTimes
from benchmarks.cluster.experts import Balance, SkewedExperts, balances, balances_table, read_counts
from benchmarks.cluster.report import Figures, figures_table, plot_figures
from benchmarks.cluster.routing import POLICIES
from benchmarks.cluster.simulation import Simulation
from benchmarks.cluster.workload import Conversation, Mix, recorded, traced
from benchmarks.command import Command, Progress, show
from fastdeploy_sd.cluster.placement import MAX_ENTRIES, PREFERENCE
from fastdeploy_sd.config import Config, ModelConfig, SchedulerConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.cost import CostModel, StepTimes
from fastdeploy_sd.spec_decode.control.profile import CostProfile

_GIGA = 1e9
# Options with a real number: name -> default, least, help. Seconds unless they say otherwise.
_REALS: dict[str, tuple[float, float, str]] = {
    "--rate": (1.0, 1e-6, "requests per second and instance, arriving at random"),
    "--turns": (4.0, 1.0, "of a conversation, on average"),
    "--pause": (5.0, 0.0, "seconds between an answer and the next turn, on average"),
    "--step-ms": (10.0, 0.0, "of a step, without --profile"),
    "--row-ms": (0.4, 0.0, "of a step per token, without --profile"),
    "--context-ms": (0.05, 0.0, "of a step per thousand tokens of contexts, without --profile"),
    "--host-ms": (0.5, 0.0, "of a step besides the model's time"),
    "--network-ms": (0.2, 0.0, "one way between two processes"),
    "--link-gbit": (10.0, 1e-6, "Gbit/s of an instance's link, for KV"),
    "--restart": (30.0, 0.0, "seconds until an instance that died is back"),
    "--slow-factor": (3.0, 0.01, "how much longer the steps of slow instances take"),
    "--skew": (1.0, 0.0, "of experts' popularity: the exponent of a Zipf law, 0 = equal"),
    "--preference": (PREFERENCE, 0.0, "how much fuller an instance may be that has the prompt's beginning, as a share"),
}


def main(argv: Sequence[str]) -> int:
    """Simulate each policy at each size, and print the figures."""
    args = _command().read(argv)
    _verify(args)
    if args.experts is not None or args.expert_counts is not None:
        balance = _balances(args)
        show(args, balance, balances_table(balance))
        return 0
    shape = _shape(args)
    runs = [(size, policy) for size in args.instances for policy in args.policies]
    progress, found = Progress(len(runs), "simulations"), []
    for size, policy in runs:
        found.append(_simulate(args, shape, size, policy))
        progress.advance(f"{size} instances, {policy}: {found[-1].num_steps} steps")
    if args.plot is not None:
        plot_figures(args.plot, found)
    show(args, found, figures_table(found))
    return 0


def _balances(args: argparse.Namespace) -> list[Balance]:
    if args.expert_counts is not None:
        if args.experts is not None:
            raise ConfigError(
                "experts: expected none with expert_counts, which say how many, got both", param="experts"
            )
        first = second = read_counts(args.expert_counts)
    else:
        skewed = SkewedExperts(args.layers, args.experts, args.skew, args.window * args.top_k, args.seed)
        first, second = skewed.windows()
    return balances(first, second, args.ranks, args.redundant, args.tokens, args.top_k)


def _simulate(args: argparse.Namespace, shape: EngineShape, size: int, policy: str) -> Figures:
    num_requests = args.requests_per_instance * size
    num_prefill = round(size * args.prefill_percent / 100)
    if args.prefill_percent and not 0 < num_prefill < size:
        text = f"expected at least one instance of either role, got {num_prefill} prefill of {size} instances"
        raise ConfigError(f"prefill_percent: {text}", param="prefill_percent")
    faults = Faults(
        args.deaths, args.hangs, args.slow, args.slow_factor, args.restart, num_requests / (args.rate * size)
    )
    deployment = Deployment(
        shape=shape,
        num_instances=size,
        policy=policy,
        preference=args.preference,
        max_entries=args.table_entries,
        num_engines=args.engines,
        num_prefill=num_prefill,
        num_routers=args.routers,
        uses_redis=args.redis,
        is_sticky=args.sticky,
        network_s=args.network_ms / 1e3,
        kv_token_bytes=args.kv_token_bytes,
        link_bytes_s=args.link_gbit * _GIGA / 8,
        faults=faults,
    )
    conversations = _conversations(args, num_requests, args.rate * size)
    return Figures.of(size, policy, Simulation(deployment, conversations, args.seed).run())


def _conversations(args: argparse.Namespace, num_requests: int, rate: float) -> Iterator[Conversation]:
    if args.trace is not None:
        return traced(args.trace, args.seed)
    mix = Mix(
        num_requests=num_requests,
        rate=rate,
        seed=args.seed,
        num_shared=args.shared_prompts,
        shared_len=args.shared_len,
        added_len=args.prompt_len,
        output_len=args.output_len,
        num_turns=args.turns,
        pause_s=args.pause,
    )
    return mix.conversations() if args.recording is None else recorded(args.recording, mix)


def _shape(args: argparse.Namespace) -> EngineShape:
    times: StepTimes = LinearTimes(args.step_ms, args.row_ms, args.context_ms)
    if args.profile is not None:
        times = CostModel(_profile(args.profile), args.max_num_batched_tokens)
    scheduler = SchedulerConfig(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens)
    config = Config(model=ModelConfig(model="simulated"), scheduler=scheduler)
    return EngineShape(config, -(-args.kv_tokens // BLOCK_SIZE), times, args.host_ms)


def _profile(path: Path) -> CostProfile:
    try:
        return CostProfile.load(path)
    except FileNotFoundError:
        raise ConfigError(f"profile: expected a cost profile, got no file {path}", param="profile") from None


def _verify(args: argparse.Namespace) -> None:
    for option, (_, least, _) in _REALS.items():
        name = option.removeprefix("--").replace("-", "_")
        value = getattr(args, name)
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{name}: expected a number of at least {least:g}, got {value}", param=name)
    if args.trace is not None and args.recording is not None:
        raise ConfigError("trace: expected no recording with it, got both", param="trace")
    for size in args.instances:
        if args.deaths + args.hangs + args.slow > size:
            text = f"expected at most {size} with hangs and slow ones, as many as instances"
            raise ConfigError(f"deaths: {text}, got {args.deaths + args.hangs + args.slow}", param="deaths")


def _command() -> Command:
    command = Command("cluster", "Simulate deployments: the product's router and engines over given step times.")
    command.number("--instances", (10,), "sizes of deployments")
    command.some("--policies", POLICIES, f"how requests are placed (default: {', '.join(POLICIES)})", [*POLICIES])
    command.number("--requests-per-instance", 100)
    command.add_argument("--recording", type=Path, metavar="FILE", help="conversations in place of a seeded mix")
    command.add_argument("--trace", type=Path, metavar="FILE", help="requests with times and lengths, as JSON lines")
    command.number("--shared-prompts", 50, "texts that conversations begin with, some more often than others")
    command.number("--shared-len", 400, "tokens of them, the median")
    command.number("--prompt-len", 60, "tokens that a turn adds, the median")
    command.number("--output-len", 100, "tokens of an answer, the median")
    command.add_argument("--profile", type=Path, metavar="FILE", help="measured times of steps: a cost profile")
    command.number("--max-num-seqs", 32, "requests in a step")
    command.number("--max-num-batched-tokens", 2048, "tokens in a step")
    command.number("--kv-tokens", 1 << 16, "of an engine's KV cache")
    command.number("--engines", 1, "of an instance (data_parallel_size)")
    command.number("--prefill-percent", 0, "of the instances only compute prompts, the others decode", least=0)
    command.number("--kv-token-bytes", 1 << 16, "of a token's KV")
    command.number("--routers", 1, "that share the requests")
    command.add_argument("--redis", action="store_true", help="clients send to any instance; these share by Redis")
    command.add_argument("--sticky", action="store_true", help="a conversation keeps its router, or its server")
    command.number("--table-entries", MAX_ENTRIES, "beginnings of prompts that a router remembers", least=0)
    command.number("--deaths", 0, "instances that die in the course of it", least=0)
    command.number("--hangs", 0, "instances that fall silent", least=0)
    command.number("--slow", 0, "instances that are slow", least=0)
    command.number("--experts", None, "of a layer: balance of expert parallel ranks in place of a deployment")
    command.add_argument(
        "--expert-counts", type=Path, metavar="FILE", help="the same of counted rows: JSON, a list a layer"
    )
    command.number("--ranks", 8, "that experts are spread over")
    command.number("--redundant", (0, 8, 32), "slots for further copies of experts", least=0)
    command.number("--layers", 24, "with experts")
    command.number("--top-k", 8, "experts of a token")
    command.number("--tokens", 64, "in a step, of all ranks")
    command.number("--window", 4096, "tokens that a placement is made from")
    command.number("--seed", 0, "of everything random", least=0)
    for option, (default, _, text) in _REALS.items():
        command.add_argument(option, type=float, default=default, metavar="X", help=f"{text} (default: {default:g})")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into a PNG file")
    command.json()
    return command
