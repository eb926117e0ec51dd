"""The other process of `bench ranks`: an engine that times steps as a line of its standard input says.

Its own first line is the number of threads of its kernels; each order is answered by a line with milliseconds. It ends
with its standard input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.engines import greedy_request, running_engine
from fastdeploy_sd.config import load_config
from fastdeploy_sd.device import library
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import FdsdError


@dataclass(frozen=True, slots=True)
class Steps:
    """What is timed.

    Attributes:
        prompt_len: tokens of each request's prompt.
        batch: requests.
        num_steps: of decoding; 0 = the computation of the prompts is timed.
    """

    prompt_len: int
    batch: int
    num_steps: int


def run_steps(engine: Engine, steps: Steps, serial: int) -> list[float]:
    """Run them in an idle engine with room for all requests; return milliseconds, one number for the prompts.

    Args:
        serial: another one every time, so that no prompt is known.
    """
    random = np.random.default_rng((serial, steps.prompt_len, steps.batch))
    started, taken = set[str](), list[float]()
    begin = time.perf_counter()
    for i in range(steps.batch):
        prompt = random.integers(0, engine.model_info.vocab_size, steps.prompt_len, np.int32)
        engine.submit(greedy_request(f"{serial}-{i}", prompt, steps.num_steps + 1))
    while len(started) < steps.batch:
        started |= {output.request_id for output in engine.step() if output.token_ids}
    prompt_ms = (time.perf_counter() - begin) * 1e3
    while engine.has_work():
        begin = time.perf_counter()
        engine.step()
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken[: steps.num_steps] if steps.num_steps else [prompt_ms]


def main(argv: Sequence[str]) -> int:
    """Serve until there are no more orders; 1 when the engine cannot be had."""
    try:
        with running_engine(load_config(argv, "python -m benchmarks ranks")) as engine:
            print(library.num_threads(), flush=True)
            for serial, line in zip(count(), sys.stdin, strict=False):
                print(json.dumps(run_steps(engine, Steps(**json.loads(line)), serial)), flush=True)
    except FdsdError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
