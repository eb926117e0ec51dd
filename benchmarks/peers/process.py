"""Runs a worker or server in a session of its own, and gives each its turn while the others are stopped.

The order of turns rotates. A peer that fails is out of the cases at hand; the reason stays in their records.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import ROOT
from benchmarks.peers.launch import Launch
from benchmarks.peers.machine import family
from benchmarks.peers.results import Case
from fastdeploy_sd.errors import FdsdError

_END_TIMEOUT_S = 20.0


class PeerError(FdsdError):
    """A peer could not do what it was asked for; the text is its own reason."""


class Process:
    """A program with all its children.

    Args:
        log: file that gets what it prints.
        has_answers: its standard output is for this process, not for the log.
    """

    def __init__(self, launch: Launch, log: Path, has_answers: bool = False) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with open(log, "wb") as output:
            self._popen = subprocess.Popen(
                launch.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if has_answers else output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **launch.environment},
                start_new_session=True,
            )

    def pause(self) -> None:
        """Stop it where it is: threads that wait by spinning would take the processor from the others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def is_alive(self) -> bool:
        """Whether it runs or is paused."""
        return self._popen.poll() is None

    def memory_bytes(self) -> int:
        """Memory of all its processes, what they share counted once; mapped files count as far as they are read."""
        kib = 0
        for pid in family(self._popen.pid):
            with suppress(OSError):  # it has ended meanwhile
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
                kib += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss:", "SwapPss:")))
        return kib << 10

    def last_line(self) -> str:
        """The last line of its log that is not empty."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def close(self) -> None:
        """End it, by force if it does not end by itself."""
        self.resume()
        assert self._popen.stdin is not None, "started with pipes"
        with suppress(BrokenPipeError):  # a command that a dead worker did not take
            self._popen.stdin.close()
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_TIMEOUT_S)
        self._signal(signal.SIGKILL)  # children that outlived it
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return  # everything has ended


class Worker(Process):
    """A worker that answers commands; see protocol.py."""

    def __init__(self, launch: Launch, log: Path) -> None:
        super().__init__(launch, log, has_answers=True)

    def call(self, command: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command to a running worker and return its result.

        Raises:
            PeerError: it reports an error, has ended, or did not answer in time and was ended therefore.
        """
        assert self._popen.stdin is not None, "started with pipes"
        try:
            self._popen.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"the worker has ended: {self.last_line()}") from None
        answer = json.loads(self._read_line(command, timeout_s))
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        result: dict[str, Any] = answer["result"]
        return result

    def _read_line(self, command: str, timeout_s: float) -> bytes:
        """A line is read whole: a worker writes each with one call, and no second one before the next command."""
        assert self._popen.stdout is not None, "started with pipes"
        end = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._popen.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                self._signal(signal.SIGKILL)  # a late answer must not be taken for the next one
                raise PeerError(f"{command}: expected an answer within {timeout_s:.0f} s, got none")
            piece = os.read(self._popen.stdout.fileno(), 1 << 16)
            if not piece:
                raise PeerError(f"the worker has ended: {self.last_line()}")
            line += piece
        return line


class Turns:
    """The peers' turns in one or several cases that are measured together.

    Args:
        processes: who takes turns, all of them paused; usually a peer's name is the key.
        cases: under the same keys, what each is measured in; a failure marks all of its own.
        on_round: called before every round; measures the machine.
    """

    def __init__(
        self, processes: Mapping[str, Process], cases: Mapping[str, Sequence[Case]], on_round: Callable[[], None]
    ) -> None:
        self._processes, self._cases, self._on_round = processes, cases, on_round

    def once(self, act: Callable[[str], object], first: int = 0) -> None:
        """Call `act` with every key that has not failed, its program running, from the `first` one on."""
        keys = list(self._processes)
        shift = first % len(keys) if keys else 0
        for key in [*keys[shift:], *keys[:shift]]:
            if all(case.failed is None for case in self._cases[key]):
                self._turn(key, act)

    def rounds(self, count: int, act: Callable[[str], object], first: int = 0) -> None:
        """The same `count` times, the machine measured before each."""
        for turn in range(first, first + count):
            self._on_round()
            self.once(act, turn)

    def _turn(self, key: str, act: Callable[[str], object]) -> None:
        self._processes[key].resume()
        try:
            act(key)
        except FdsdError as error:
            for case in self._cases[key]:
                case.failed = error.message
        finally:
            self._processes[key].pause()


def verify_tokens(got: list[int], expected: list[int]) -> None:
    """Refuse a figure of a model that computes something else.

    Raises:
        PeerError: the tokens are not those of the count.
    """
    if got != expected:
        raise PeerError(f"tokens: expected {expected[:8]}, got {got[:8]}")
