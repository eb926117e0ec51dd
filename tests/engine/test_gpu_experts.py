"""The promise where experts are spread over GPUs and move: the bytes of one, and a lost rank costs a wait.

Each engine is a process, and each rank has a GPU with memory of its own, of which the others open what it shares.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fastdeploy_sd.cli.verify import run_alone
from fastdeploy_sd.device.expert_service import expert_segment
from tests.engine.gpu import model_with_layers, tiny_config
from tests.engine.gpu_engine_process import NUM_REQUESTS, PLAIN_REQUESTS, requests
from tests.ops.cuda_device import EMULATED
from tests.ops.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kind")]

ALL = tuple(range(NUM_REQUESTS))


class EngineProcess:
    """An engine in a process of its own; see gpu_engine_process.py."""

    def __init__(self, fd: int, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.engine.gpu_engine_process", str(fd), *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, pass_fds=[fd], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def send(self, order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def reply(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            pass


class Engines:
    """Engines over one segment, which can be started again."""

    def __init__(self, fd: int, num_engines: int, *arguments: object) -> None:
        self._fd, self._arguments = fd, (num_engines, *arguments)
        self.engines = [self._started(number) for number in range(num_engines)]

    def _started(self, number: int) -> EngineProcess:
        return EngineProcess(self._fd, number, *self._arguments)

    def start_again(self, number: int) -> None:
        self.engines[number].kill()
        self.engines[number] = self._started(number)

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()


@contextlib.contextmanager
def engines_of(
    num_engines: int, size: int, model: pathlib.Path, method: str, num_redundant: int = 0, timeout_s: float = 60.0
) -> Iterator[Engines]:
    """Engines that serve, of `size` ranks each; they leave together in the end."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("FDSD_EMULATED_GPUS", str(num_engines * size))
        fd = expert_segment()
        stack.callback(os.close, fd)
        found = Engines(fd, num_engines, size, model, method, num_redundant, timeout_s)
        stack.callback(found.kill)
        assert [engine.reply() for engine in found.engines] == ["serves"] * num_engines
        yield found
        running = [engine for engine in found.engines if engine.process.poll() is None]
        for engine in running:
            engine.send("stop")
        assert [engine.process.wait(60) for engine in running] == [0] * len(running)


@pytest.fixture(scope="module")
def model_of(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoint with draft layers by the name of the golden model."""
    if kind != EMULATED:
        pytest.skip("engines over several GPUs, and there is one")
    return functools.cache(lambda name: model_with_layers(tmp_path_factory.mktemp("model"), name))


@functools.cache
def alone(model: pathlib.Path, numbers: tuple[int, ...] = ALL) -> Mapping[str, str]:
    """What each request gets by itself on one GPU."""
    wanted = requests()
    found = run_alone(tiny_config(model), [wanted[i] for i in numbers])
    return {name: repr(answer) for name, answer in found.items()}


def answers_of(found: Engines) -> tuple[Mapping[str, str], list[int]]:
    """What all get, the last request of another engine than the others, and the rows that each rank has served."""
    for engine, share in zip(found.engines, (ALL[:-1], ALL[-1:]), strict=True):
        engine.send(share)
    first, (second, served) = (engine.reply() for engine in found.engines)
    return first[0] | second, served


def test_engines_of_two_gpus_give_the_bytes_of_one_while_experts_move(model_of: Any) -> None:
    """Greedy, seeded and guided, prompts in parts, log-probabilities; the last engine ends early, and serves."""
    model = model_of("ernie4_5_moe-tiny")
    with engines_of(2, 2, model, "naive", num_redundant=3) as found:
        first = found.engines[0]
        first.send("move")
        answers, served = answers_of(found)
        first.send("counts")
        assert first.reply()[0] > 10
    assert answers == alone(model)
    assert len(served) == 4
    assert min(served) > 0


def test_an_engine_that_is_killed_while_experts_move_costs_the_other_no_byte(model_of: Any) -> None:
    """With experts in draft layers too; it starts again. One that does not fails the step, by its name.

    Steps begin before the tokens of those in flight are known.
    """
    model = model_of("qwen3_moe-tiny")
    with engines_of(2, 1, model, "mtp") as found:
        first, second = found.engines
        assert answers_of(found)[0] == alone(model)
        first.send("move")
        first.send(PLAIN_REQUESTS)
        second.send(ALL[:1])
        found.start_again(1)
        assert found.engines[1].reply() == "serves"
        assert first.reply()[0] == alone(model, PLAIN_REQUESTS)
        first.send("counts")
        num_places, num_ahead = first.reply()
        assert num_places > 10
        assert num_ahead > 0
        found.engines[1].kill()
        first.send("1 is gone")
        first.send(PLAIN_REQUESTS)
        lost = "experts of another engine are lost: rank 1 has ended, and no other has its experts"
        assert first.reply() == f"error: {lost}"
