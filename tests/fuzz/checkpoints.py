"""Starts of damaged checkpoints: each ends with a served model or one clear line, never otherwise.

    python -m tests.fuzz.checkpoints --seed S --count N

Every start is a function of the seed and its number. A worker process makes the starts one after the other, within
limits of memory and time; one that hangs or dies is killed, reported, and replaced. `--only NUMBER` runs one again.
"""

from __future__ import annotations

import argparse
import collections
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.checkpoint_mutations import write_mutant

_ROOT = Path(__file__).resolve().parents[2]
# A start takes a second; what takes this long hangs, on a busy machine too.
MAX_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Start:
    """What became of one start; see tests/fuzz/checkpoint_start.py for outcome and detail."""

    seed: str
    what: str
    outcome: str
    detail: str


class Worker:
    """A process that makes starts; closed when it is dropped by `with`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.checkpoint_start"], cwd=_ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, seed: str, max_seconds: float = MAX_SECONDS) -> Start | None:
        """Return what became of a start, None where the process hangs or died: then it is of no more use."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n".encode())
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], max_seconds)[0]:
            return None
        line = self._process.stdout.readline()
        return Start(**json.loads(line)) if line.startswith(b"{") else None

    def status(self) -> str:
        """Return why there was no answer."""
        code = self._process.poll()
        return f"no answer in {MAX_SECONDS:g} s" if code is None else f"died with status {code}"


def run_starts(seeds: Iterator[str]) -> Iterator[Start]:
    """Yield what became of each start."""
    worker = Worker()
    for seed in seeds:
        start = worker.run(seed)
        if start is None:
            yield Start(seed, _what(seed), "broken", worker.status())
            worker.__exit__()
            worker = Worker()
        else:
            yield start
    worker.__exit__()


def _what(seed: str) -> str:
    with tempfile.TemporaryDirectory(prefix="fdsd-mutant-") as name:
        return write_mutant(seed, Path(name))


def main() -> int:
    """Run the starts of the command line; 1 where one is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="0")
    parser.add_argument("--count", type=int, default=0, help="how many; 0 = until interrupted")
    parser.add_argument("--only", type=int, help="the number of one start")
    args = parser.parse_args()
    numbers = range(args.only, args.only + 1) if args.only is not None else range(args.count or sys.maxsize)
    outcomes: collections.Counter[str] = collections.Counter()
    try:
        for start in run_starts(f"{args.seed}/{number}" for number in numbers):
            outcomes[start.outcome] += 1
            if start.outcome == "broken" or args.only is not None:
                print(f"{start.seed}: {start.outcome}: {start.what}\n    {start.detail}", flush=True)
            if outcomes.total() % 250 == 0:
                print(dict(outcomes), flush=True)
    except KeyboardInterrupt:
        pass
    print(dict(outcomes))
    return 1 if outcomes["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
