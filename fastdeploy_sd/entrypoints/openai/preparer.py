"""Turns bodies into jobs so that no body delays the others.

A small body is prepared in a thread, which costs less than waking another process. Large bodies, grammars, and small
bodies that compute for too long go to worker processes under limits on memory and time. Knows no HTTP and does not look
into a body.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from fastdeploy_sd.config import Config, to_json
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.preparation import Outcome, Preparation, too_complex
from fastdeploy_sd.errors import FdsdError, InternalError, Overloaded, Unavailable
from fastdeploy_sd.process.child import describe_exit
from fastdeploy_sd.process.fork_worker import WorkerLimits
from fastdeploy_sd.process.forked import ForkServer, ForkServerEndedError, Worker, WorkerEndedError
from fastdeploy_sd.process.limited_thread import TimeLimitError, run_within
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.reasoning_formats import find_format
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.text.tool_calls.formats import find_format as find_call_format
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.codec import pack, unpack

logger = logging.getLogger(__name__)

_LOADER = "fastdeploy_sd.entrypoints.openai.preparation:load"
_SETUP = "setup"


@dataclass(frozen=True, slots=True)
class LaneRules:
    """How bodies of one size are prepared by workers.

    Attributes:
        max_bytes: of a body.
        max_workers: bodies prepared at a time.
        keeps_workers: a worker takes one body after the other, else each has its own.
        limits: of each worker.
    """

    max_bytes: float
    max_workers: int
    keeps_workers: bool
    limits: WorkerLimits


LOCAL_BYTES = 1 << 14
# A small body takes about a millisecond. A chat template is a program of the checkpoint: after one body that takes too
# long, the next ones go to workers, whatever they hold.
LOCAL_CPU_S = 0.05
_NUM_AFTER_SLOW = 1000
# A worker that uses no processor time is stuck; one that gets little of it needs longer by the clock.
_CPU_TIMEOUTS = 6
# Encoding takes some 200 bytes of memory and a microsecond per byte of text. What cannot fit into the context is
# refused before that; these limits are for what may fit, and for tokenizers and templates that misbehave.
LANES = (
    LaneRules(LOCAL_BYTES, 2, True, WorkerLimits(nice=0, memory_bytes=512 << 20, cpu_s=5)),
    LaneRules(1 << 18, 2, True, WorkerLimits(nice=0, memory_bytes=512 << 20, cpu_s=10)),
    LaneRules(math.inf, 2, False, WorkerLimits(nice=10, memory_bytes=2 << 30, cpu_s=60)),
)
_NEEDS_WORKER = Outcome(needs_worker=True)


class Preparer:
    """Turns bodies into jobs. Starts no process before `start` or the first body that is not small.

    Args:
        config: what was started.
        model_info: the loaded model, once there is one.

    Attributes:
        tokenizer: of the checkpoint.
        parsers: what takes answers apart, in words for the log.

    Raises:
        CheckpointError: the tokenizer's files or the chat template are missing or malformed.
        ConfigError: the tokenizer backend is not installed, or the format of reasoning is unknown.
    """

    def __init__(self, config: Config, model_info: Callable[[], ModelInfo]) -> None:
        self.tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.tokenizer_backend)
        self._encoder = PromptEncoder(self.tokenizer)
        template = self.tokenizer.files.chat_template
        reasoning = find_format(config.model.reasoning_parser, template)
        calls = find_call_format(config.model.tool_call_parser, template) or "none"
        if config.model.tool_call_parser == "auto":
            calls += ", and bare JSON"
        self.parsers = f"reasoning parser: {reasoning.name if reasoning else 'none'}; tool call parser: {calls}"
        self._config = config
        self._model_info = model_info
        self._server: ForkServer | None = None
        self._is_closed = False
        self._num_to_workers = 0
        limit = config.scheduler.max_num_queued_requests
        self._lanes = [_Lane(rules, self._fork, limit) for rules in LANES]

    def start(self) -> None:
        """Start the process that workers are forked from, unless it runs already."""
        if self._server is None or self._server.is_closed:
            self._server = ForkServer(_LOADER, {"name": "text", "config": to_json(self._config)})

    @property
    def server_pid(self) -> int | None:
        """The process that workers are forked from, None while there is none."""
        return None if self._server is None or self._server.is_closed else self._server.pid

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()

    async def prepare(self, task: str, content: bytes) -> GenerationJob:
        """Return the job of a body; cancelling it ends the work.

        Args:
            task: a task of `Preparation`.
            content: the body as it came.

        Raises:
            FdsdError: of the status that tells the client what happened.
        """
        outcome = await self._run(task, content)
        assert outcome.job is not None, f"{task} is not a task that makes jobs"
        return outcome.job

    async def compute(self, task: str, content: bytes) -> str:
        """Return the answer to a request that needs no engine, as JSON; arguments and errors as for `prepare`."""
        outcome = await self._run(task, content)
        assert outcome.answer is not None, f"{task} is not a task that makes answers"
        return outcome.answer

    async def _run(self, task: str, content: bytes) -> Outcome:
        outcome = await self._run_locally(task, content) if len(content) <= LOCAL_BYTES else _NEEDS_WORKER
        if outcome.needs_worker:
            outcome = await self._run_in_worker(task, content)
        if outcome.error is not None:
            raise outcome.error.to_exception()
        if outcome.failure is not None:
            logger.error("preparing a body failed:\n%s", outcome.failure)
            raise InternalError("the server failed on this request; its log says why")
        return outcome

    async def _run_locally(self, task: str, content: bytes) -> Outcome:
        if self._num_to_workers > 0:
            self._num_to_workers -= 1
            return _NEEDS_WORKER
        local = self._local
        try:
            return await run_within(LOCAL_CPU_S, lambda: local.run(task, content))
        except TimeLimitError:
            logger.warning("a body of %d bytes took more than %g s: the next go to workers", len(content), LOCAL_CPU_S)
            self._num_to_workers = _NUM_AFTER_SLOW
            return _NEEDS_WORKER

    @cached_property
    def _local(self) -> Preparation:
        return Preparation(self._encoder, self._config, self._model_info())

    async def _run_in_worker(self, task: str, content: bytes) -> Outcome:
        lane = next(lane for lane in self._lanes if len(content) <= lane.max_bytes)
        try:
            return unpack(Outcome, await lane.run(task, content))
        except WorkerEndedError as error:
            if self._is_closed:
                raise _shutting_down() from None
            raise _explained(error, len(content)) from None

    async def _fork(self, limits: WorkerLimits) -> Worker:
        for _ in range(2):  # the process may have been killed, which shows when it is asked
            if self._is_closed:
                raise _shutting_down()
            self.start()
            assert self._server is not None
            try:
                worker = await self._server.fork(limits)
            except ForkServerEndedError:
                continue
            await worker.tell(_SETUP, pack(self._model_info()))
            return worker
        raise InternalError("the process that prepares requests ended; the server's log says why")


# How a worker ends that passes a limit: the kernel ends it, or a library finds no memory, or no room on the stack.
_EXCESS = {-signal.SIGXCPU: "time", -signal.SIGABRT: "memory", -signal.SIGSEGV: "memory"}


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down")


def _explained(error: WorkerEndedError, num_bytes: int) -> FdsdError:
    """What to tell the client of a worker that ended; the log gets a line."""
    what = _EXCESS.get(error.status)
    if what is None:
        logger.error("a worker that prepared a body of %d bytes ended (%s)", num_bytes, describe_exit(error.status))
        return InternalError("the process that prepared this request ended; the server's log says why")
    logger.warning("a body of %d bytes is refused: preparing it takes too much %s", num_bytes, what)
    return too_complex(what, error.note)


class _Lane:
    """The workers of one kind of bodies; a body waits while all are taken, first come first served."""

    def __init__(self, rules: LaneRules, fork: Callable[[WorkerLimits], Awaitable[Worker]], max_waiting: int) -> None:
        self.max_bytes = rules.max_bytes
        self._rules = rules
        self._fork = fork
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._free = asyncio.Semaphore(rules.max_workers)
        self._idle: list[Worker] = []

    async def run(self, task: str, content: bytes) -> bytes:
        """Return a worker's result.

        Raises:
            Overloaded: too many bodies wait.
            WorkerEndedError: the body passed a limit.
        """
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"queue: expected fewer than {self._max_waiting} bodies to be prepared, got more")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            return await self._run(task, content)
        finally:
            self._free.release()

    async def _run(self, task: str, content: bytes) -> bytes:
        ended = ""
        if idle := self._take_idle():
            try:
                return await self._call(idle, task, content)
            except WorkerEndedError as error:
                if error.status in _EXCESS:
                    raise
                ended = describe_exit(error.status)  # killed from outside, perhaps before it saw the body
        worker = await self._fork(self._rules.limits)
        if ended:
            logger.warning("a worker ended (%s): its body goes to another one", ended)
        return await self._call(worker, task, content)

    def _take_idle(self) -> Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_running:
                return worker
            worker.close()
        return None

    async def _call(self, worker: Worker, task: str, content: bytes) -> bytes:
        is_kept = False
        try:
            async with asyncio.timeout(_CPU_TIMEOUTS * self._rules.limits.cpu_s):
                result = await worker.call(task, content)
            is_kept = self._rules.keeps_workers
            return result
        except TimeoutError:
            raise WorkerEndedError(-signal.SIGXCPU, worker.note) from None  # `finally` ends it
        finally:
            if is_kept:
                self._idle.append(worker)
            else:
                worker.close()
