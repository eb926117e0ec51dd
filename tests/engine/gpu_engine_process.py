"""One engine of those that share experts, each with GPUs of its own: does what the lines of its standard input say.

Usage: python -m tests.engine.gpu_engine_process FD NUMBER ENGINES RANKS MODEL METHOD REDUNDANT TIMEOUT_S

What it says first is that it serves its experts. An order is "stop", "1 is gone", "move", from which on experts move at
random, "counts", how many placements that has led to and steps that began before the tokens of the last one were known,
or a list of request numbers, whose answers in words it then says, and the rows that each rank has run its experts on.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastdeploy_sd.cli.verify import PLAIN, standard_methods
from fastdeploy_sd.cli.verify.runs import engine_config, run
from fastdeploy_sd.config import ParallelConfig
from fastdeploy_sd.config.eplb import EplbConfig
from fastdeploy_sd.device import expert_service
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.types import Request, SchedulerOutput
from fastdeploy_sd.worker.step.step_launcher import StepLauncher
from tests.engine.gpu import BATCH, short_requests, tiny_config
from tests.engine.test_expert_parallel import random_moves, start
from tests.engine.test_gpu_ahead import plain_requests

# Greedy, seeded, with log-probabilities and with a grammar.
NUM_REQUESTS, NUM_TOKENS = 4, 4
# Those whose next step may begin before their tokens are known.
PLAIN_REQUESTS = (4, 5)


def requests() -> Sequence[Request]:
    found = [replace(request, max_tokens=NUM_TOKENS) for request in short_requests()[:NUM_REQUESTS]]
    return found + [replace(request, request_id=f"plain {request.request_id}") for request in plain_requests(2)]


def count_ahead() -> list[bool]:
    """From now on, note of each step that starts whether another one is in flight."""
    start, found = StepLauncher._start, list[bool]()

    def noted(launcher: StepLauncher, plan: SchedulerOutput, *, is_open: bool) -> bool:
        found.append(bool(launcher._in_flight))
        return start(launcher, plan, is_open=is_open)

    setattr(StepLauncher, "_start", noted)  # noqa: B010 (a method)
    return found


def main() -> int:
    fd, number, engines, ranks = map(int, sys.argv[1:5])
    model, name, num_redundant, timeout_s = sys.argv[5], sys.argv[6], int(sys.argv[7]), float(sys.argv[8])
    expert_service._PAUSE_S = 0.005  # experts move often
    parallel = ParallelConfig(
        tensor_parallel_size=ranks,
        data_parallel_size=engines,
        local_data_parallel_id=number,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=EplbConfig(redundant_experts_num=num_redundant),
        rank_timeout_s=timeout_s,
    )
    method = PLAIN if name == "naive" else standard_methods([name], [3])[0]
    config = engine_config(replace(tiny_config(pathlib.Path(model)), parallel=parallel), BATCH, method)
    executor = start(config, method, fd)
    experts = executor.experts
    assert experts is not None
    engine, wanted = Engine(config, executor), requests()
    move, seen = random_moves(experts, num_redundant)
    ahead = count_ahead()
    print(json.dumps("serves"), flush=True)
    for line in sys.stdin:
        order: Any = json.loads(line)
        if order == "stop":
            break
        if order == "1 is gone":
            experts.mark_gone(1)
            continue
        if order == "move":
            experts.repeat(move, "moves")
            continue
        if order == "counts":
            print(json.dumps([len(seen), sum(ahead)]), flush=True)
            continue
        try:
            answers = run(engine, [wanted[i] for i in order])
            served = experts.served().sum(axis=1).tolist()
            print(json.dumps([{name: repr(answer) for name, answer in answers.items()}, served]), flush=True)
        except FdsdError as error:
            print(json.dumps(f"error: {error.message}"), flush=True)
    executor.leave(30.0)
    executor.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
