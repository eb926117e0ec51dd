"""Minutes of mixed load on a whole deployment, with a fault every few seconds.

    python -m tests.fuzz.soak [--seed S] [--minutes M] [--period SECONDS] [--model DIR] [--no-redis] [--protocol P]
                              [--engines N [--spread]]

Two routers, two prefill and two decode instances, and a Redis through which they share requests. Clients send requests
whose answers are known to routers and to instances; meanwhile a process is killed, suspended or asked to stop every few
seconds, and started again. Of servers with several engines mostly single engines are. Nothing may be lost: a request
ends with the bytes of an undisturbed server, or with a beginning of them and an error that says why; or its connection
breaks, with what it was connected to. Afterwards every block is free, every request is answered right once more, memory
has not grown, every process ends well, and nothing is left.

The faults of a seed are drawn in the same order, but when one is possible depends on when the last one is over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.doubles.ports import free_port
from tests.doubles.redis_server import RedisServer, running_redis
from tests.fuzz.soak_load import Load, make_asks
from tests.fuzz.soak_units import Fault, ProcessUnit, RedisUnit, Unit
from tests.server.split_deployment import ModelServer, SplitDeployment, family

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "qwen3-tiny"
NUM_CLIENTS = 10
NUM_ASKS = 60
SAMPLE_S = 1.0
# A process is judged from this age on: before, it uses memory for the first time.
MIN_AGE_S = 60.0
MAX_GROWTH_KB = 24 * 1024
MAX_NEW_FILES = 24
# Two of a kind, with different methods.
METHODS: list[dict[str, Any]] = [{"method": "ngram", "num_speculative_tokens": 3}, {"method": "suffix"}]
SHARED: dict[str, Any] = {
    "max_model_len": 2048,
    "block_size": 16,
    "num_gpu_blocks_override": 400,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "pd_timeout": 10,
}


# Of several engines; each is given up as silent after less than the longest of the faults.
_SEVERAL: dict[str, Any] = {"timeout_engine": 6}
_ALONE: dict[str, Any] = {"data_parallel_size": 1, "enable_expert_parallel": False}


@dataclass
class Watch:
    """Memory and open files of processes, over time. samples: (label, pid) -> (resident KiB, descriptors)."""

    samples: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)

    def look(self, label: str, pid: int) -> None:
        """Take a sample of a process and of what it started."""
        for number, member in enumerate(family(pid)):
            with contextlib.suppress(OSError, IndexError, ValueError):
                status = Path(f"/proc/{member}/status").read_text()
                sample = int(status.split("VmRSS:")[1].split()[0]), len(list(Path(f"/proc/{member}/fd").iterdir()))
                self.samples.setdefault((f"{label}, process {min(number, 3)}", member), []).append(sample)

    def growth(self) -> dict[str, tuple[float, float, float]]:
        """Of the oldest process of each label: age in seconds, growth in KiB and descriptors in the last half of it."""
        found: dict[str, tuple[float, float, float]] = {}
        for (label, _), samples in self.samples.items():
            age = len(samples) * SAMPLE_S
            if age >= MIN_AGE_S and age > found.get(label, (0.0,))[0]:
                third = len(samples) // 3
                begin, end = samples[third : 2 * third], samples[-third:]
                grown = [statistics.median(s[i] for s in end) - statistics.median(s[i] for s in begin) for i in (0, 1)]
                found[label] = age, grown[0], grown[1]
        return found


class Soak:
    """See the module.

    Args:
        redis: instances share their requests through it; None = routers alone choose.
        num_asks: different requests.
        num_engines: of each server.
    """

    def __init__(
        self,
        deployment: SplitDeployment,
        seed: int,
        redis: RedisServer | None,
        num_asks: int = NUM_ASKS,
        num_engines: int = 1,
    ) -> None:
        self._deployment = deployment
        self._redis = None if redis is None else RedisUnit(redis)
        self._rng = random.Random(f"faults {seed}")
        self.faults: list[str] = []
        self.watch = Watch()
        router = partial(deployment.router, timeout_silent=2, timeout_lost=4, timeout_resume=60)
        self._routers = [ProcessUnit(f"router {i}", partial(router, free_port())) for i in range(2)]
        self._instances = [
            ProcessUnit(f"{role} {i}", partial(deployment.server, role, speculative_config=speculation), num_engines)
            for role in ("prefill", "decode")
            for i, speculation in enumerate(METHODS)
        ]
        # Without a Redis a prefill instance would compute requests of its own alone.
        doors = [*self._routers, *self._routers, *self._instances[0 if redis else 2 :]]
        self.load = Load(make_asks(seed, num_asks), doors, seed)

    async def run(self, seconds: float, period_s: float) -> None:
        """Everything, in order."""
        for unit in (*self._routers, *self._instances):
            await unit.wait_up()
        alone = self._deployment.server("mixed", router=[], scheduler_name="local", **_ALONE)
        await self.load.learn(await asyncio.to_thread(lambda: alone.url))
        alone.process.terminate()
        assert await asyncio.to_thread(alone.wait) == 0
        await self._wait_for_all()
        clients = asyncio.create_task(self.load.run(NUM_CLIENTS))
        watching = asyncio.create_task(self._watch())
        await self._disturb(time.monotonic() + seconds, period_s)
        self.load.is_over = True
        await clients
        watching.cancel()
        await self._verify_end()

    async def _disturb(self, end: float, period_s: float) -> None:
        under_way: set[asyncio.Task[None]] = set()
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(period_s, left))
            chosen = self._choose()
            if chosen is not None and left > period_s:
                under_way.add(asyncio.create_task(self._fault(*chosen)))
            for task in [task for task in under_way if task.done()]:
                under_way.remove(task)
                task.result()
        await asyncio.gather(*under_way)

    def _choose(self) -> tuple[Unit, list[Fault]] | None:
        """Something, and what may happen to it so that there is always one of each kind at work."""
        able: list[tuple[Unit, list[Fault]]] = []
        for pair in (self._routers, self._instances[:2], self._instances[2:]):
            faulty = [unit for unit in pair if unit.is_faulty]
            if all(unit.is_partly_faulty for unit in faulty):
                able += [(u, u.partial_faults() if faulty else u.faults()) for u in pair if u not in faulty]
        if self._redis is not None and not self._redis.is_faulty:
            able.append((self._redis, self._redis.faults()))
        able = [(unit, faults) for unit, faults in able if faults]
        return self._rng.choice(able) if able else None

    async def _fault(self, unit: Unit, faults: list[Fault]) -> None:
        begin = time.monotonic()
        try:
            what = await unit.disturb(random.Random(self._rng.random()), faults)
        except Exception as error:  # a unit that did not come back is a finding, and the others go on
            self.load.add_finding(f"{unit.name}: {error!r}")
            return
        self.faults.append(what)
        print(f"{what} ({time.monotonic() - begin:.1f} s)", file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        while True:
            for unit in (*self._routers, *self._instances):
                if unit.url is not None:
                    self.watch.look(unit.name.split()[0], unit.program.process.pid)
            await asyncio.sleep(SAMPLE_S)

    async def _wait_for_all(self) -> None:
        servers = [u.program for u in self._instances if isinstance(u.program, ModelServer)]
        await asyncio.to_thread(self._deployment.wait_for, *servers)

    async def _verify_end(self) -> None:
        await self._wait_for_all()
        for door in (*self._routers, self._instances[-1]):
            await self.load.ask_all(door)
        for unit in self._instances:
            if isinstance(unit.program, ModelServer):
                await asyncio.to_thread(unit.program.wait_idle)
        for label, (age, kb, files) in self.watch.growth().items():
            if kb > MAX_GROWTH_KB or files > MAX_NEW_FILES:
                self.load.add_finding(f"{label} has grown by {kb:.0f} KiB and {files:.0f} files, aged {age:.0f} s")
        await asyncio.to_thread(self._deployment.stop)
        self._deployment.verify_nothing_left()

    def report(self) -> str:
        """What happened, for people."""
        ends = "\n".join(f"{count:7} {outcome}" for outcome, count in self.load.outcomes.most_common())
        growth = "\n".join(
            f"{label}: {kb:+.0f} KiB, {files:+.0f} files in half of {age:.0f} s"
            for label, (age, kb, files) in sorted(self.watch.growth().items())
        )
        return f"{len(self.faults)} faults\n{ends}\n{growth}\n{len(self.load.findings)} findings"


def soak(
    seed: int,
    seconds: float,
    period_s: float,
    model: Path | str = GOLDEN,
    protocol: str = "ipc,tcp",
    *,
    with_redis: bool = True,
    num_asks: int = NUM_ASKS,
    num_engines: int = 1,
    spreads_experts: bool = False,
) -> Soak:
    """Run a soak on a deployment of its own; return what it saw. `num_engines`: of each server."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        redis = stack.enter_context(running_redis(folder)) if with_redis else None
        options = SHARED | {"cache_transfer_protocol": protocol}
        if num_engines > 1:
            options |= {"data_parallel_size": num_engines, "enable_expert_parallel": spreads_experts, **_SEVERAL}
        deployment = stack.enter_context(SplitDeployment(model, redis, **options))
        run = Soak(deployment, seed, redis, num_asks, num_engines)
        asyncio.run(run.run(seconds, period_s))
    return run


def main() -> int:
    """Entry point; the exit status is 1 when something was found. Standard output is the logs of all processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--model", default=str(GOLDEN), help="checkpoint, or demo")
    parser.add_argument("--protocol", default="ipc,tcp", help="how KV travels")
    parser.add_argument("--no-redis", action="store_true", help="routers alone choose")
    parser.add_argument("--engines", type=int, default=1, help="of each server (data_parallel_size)")
    parser.add_argument("--spread", action="store_true", help="experts are spread over a server's engines")
    given = parser.parse_args()
    run = soak(
        given.seed,
        given.minutes * 60,
        given.period,
        given.model,
        given.protocol,
        with_redis=not given.no_redis,
        num_engines=given.engines,
        spreads_experts=given.spread,
    )
    print(run.report(), file=sys.stderr)
    return 1 if run.load.findings else 0


if __name__ == "__main__":
    sys.exit(main())
