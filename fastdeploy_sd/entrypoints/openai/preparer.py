"""Turns bodies into jobs so that no body delays the others.

A small body is prepared in a thread, which costs less than waking another process. Large bodies, grammars, and small
bodies that compute for too long go to worker processes under limits on memory and time. Knows no HTTP and does not look
into a body.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from fastdeploy_sd.config import Config, to_json
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.preparation import Given, Outcome, Preparation, too_complex
from fastdeploy_sd.errors import FdsdError, InternalError, Overloaded, Unavailable
from fastdeploy_sd.process.child import describe_exit
from fastdeploy_sd.process.limited_thread import TimeLimitError, run_within
from fastdeploy_sd.process.sandbox import EXCESS, Sandbox, SandboxEndedError, Worker, WorkerEndedError
from fastdeploy_sd.process.sandbox_worker import WorkerLimits
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.reasoning_formats import find_format
from fastdeploy_sd.text.request_defaults import describe_defaults
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.text.tool_calls.formats import find_format as find_call_format
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.codec import pack, unpack

logger = logging.getLogger(__name__)

_LOADER = "fastdeploy_sd.entrypoints.openai.preparation:load"


@dataclass(frozen=True, slots=True)
class WorkerPoolLimits:
    """How workers prepare the bodies of one size.

    Attributes:
        max_bytes: of a body.
        keeps_workers: a worker prepares one body after another; else each body gets a new worker.
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
# Encoding takes some 200 bytes of memory and a microsecond per byte of text. What cannot fit into the context is
# refused before that; these limits are for what may fit, and for tokenizers and templates that misbehave.
POOLS = (
    WorkerPoolLimits(LOCAL_BYTES, 2, True, WorkerLimits(nice=0, memory_bytes=512 << 20, cpu_s=5)),
    WorkerPoolLimits(1 << 18, 2, True, WorkerLimits(nice=0, memory_bytes=512 << 20, cpu_s=10)),
    WorkerPoolLimits(math.inf, 2, False, WorkerLimits(nice=10, memory_bytes=2 << 30, cpu_s=60)),
)
_NEEDS_WORKER = Outcome(needs_worker=True)


class Preparer:
    """Turns bodies into jobs. Starts no process before `start` or the first body that is not small.

    Attributes:
        parsers: what takes answers apart, in words for the log.
        defaults: of what requests leave open, in such words.
        local_cpu_s: how long a small body may compute in a thread.

    Raises:
        CheckpointError: the tokenizer's files or the chat template are missing or malformed.
        ConfigError: the tokenizer backend is not installed, or the format of reasoning is unknown.
    """

    local_cpu_s = LOCAL_CPU_S

    def __init__(self, config: Config, model_info: Callable[[], ModelInfo]) -> None:
        self.tokenizer = load_tokenizer(*config.model.tokenizer_source)
        self._encoder = PromptEncoder(self.tokenizer)
        template = self.tokenizer.files.chat_template
        reasoning = find_format(config.model.reasoning_parser, template)
        calls = find_call_format(config.model.tool_call_parser, template) or "none"
        if config.model.tool_call_parser == "auto":
            calls += ", and bare JSON"
        self.parsers = f"reasoning parser: {reasoning.name if reasoning else 'none'}; tool call parser: {calls}"
        self.defaults = describe_defaults(*config.model.defaults_source)
        self._config = config
        self._model_info = model_info
        self._sandbox = Sandbox(_LOADER, "text", to_json(config))
        self._is_closed = False
        self._num_to_workers = 0
        max_waiting = config.scheduler.max_num_queued_requests
        self._pools = [_WorkerPool(limits, self._fork, max_waiting) for limits in POOLS]

    def start(self) -> None:
        """Start the process that workers are forked from, unless it runs already."""
        self._sandbox.start()

    @property
    def server_pid(self) -> int | None:
        """The process that workers are forked from, None while there is none."""
        return self._sandbox.pid

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        self._sandbox.close()
        for pool in self._pools:
            pool.close()

    async def prepare(self, task: str, content: bytes) -> GenerationJob | str:
        """Return the job of a body, or the JSON of its answer where it asks for no tokens; cancelling ends the work.

        Raises:
            FdsdError: of the status that tells the client what happened.
        """
        outcome = await self._run(task, content)
        prepared = outcome.job or outcome.answer
        assert prepared is not None, f"{task} is not a task that makes jobs"
        return prepared

    async def compute(self, task: str, content: bytes) -> str:
        """Return the answer to a request that needs no engine, as JSON; arguments and errors as for `prepare`."""
        outcome = await self._run(task, content)
        assert outcome.answer is not None, f"{task} is not a task that makes answers"
        return outcome.answer

    async def _run(self, task: str, content: bytes) -> Outcome:
        given = Given(content, tuple(source.adapter for source in self._model_info().adapters))
        outcome = await self._run_locally(task, given) if len(content) <= LOCAL_BYTES else _NEEDS_WORKER
        if outcome.needs_worker:
            outcome = await self._run_in_worker(task, given)
        if outcome.error is not None:
            raise outcome.error.to_exception()
        if outcome.failure is not None:
            logger.error("preparing a body failed:\n%s", outcome.failure)
            raise InternalError("the server failed on this request; its log says why")
        return outcome

    async def _run_locally(self, task: str, given: Given) -> Outcome:
        if self._num_to_workers > 0:
            self._num_to_workers -= 1
            return _NEEDS_WORKER
        local = self._local
        try:
            return await run_within(self.local_cpu_s, lambda: local.run(task, given))
        except TimeLimitError:
            logger.warning(
                "a body of %d bytes took more than %g s: the next go to workers", len(given.content), self.local_cpu_s
            )
            self._num_to_workers = _NUM_AFTER_SLOW
            return _NEEDS_WORKER

    @cached_property
    def _local(self) -> Preparation:
        return Preparation(self._encoder, self._config, self._model_info())

    async def _run_in_worker(self, task: str, given: Given) -> Outcome:
        num_bytes = len(given.content)
        pool = next(pool for pool in self._pools if num_bytes <= pool.limits.max_bytes)
        try:
            return unpack(Outcome, await pool.run(task, pack(given)))
        except (WorkerEndedError, SandboxEndedError) as error:
            if self._is_closed:
                raise Unavailable("the server is shutting down") from None
            raise _explained(error, num_bytes) from None

    def _fork(self, limits: WorkerLimits) -> Worker:
        return self._sandbox.fork(limits, pack(self._model_info()))


def _explained(error: WorkerEndedError | SandboxEndedError, num_bytes: int) -> FdsdError:
    """Return what to tell the client of a worker that ended; the log gets a line."""
    if isinstance(error, SandboxEndedError):
        return InternalError("the process that prepares requests ended; the server's log says why")
    what = EXCESS.get(error.status)
    if what is None:
        logger.error("a worker that prepared a body of %d bytes ended (%s)", num_bytes, describe_exit(error.status))
        return InternalError("the process that prepared this request ended; the server's log says why")
    logger.warning("a body of %d bytes is refused: preparing it takes too much %s", num_bytes, what)
    return too_complex(what, error.note)


class _Call:
    """One body in a pool. Cancelling it kills its worker, but never one that has been given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_cancelled = False
        self._worker: Worker | None = None

    def begin(self, worker: Worker) -> None:
        """The worker is this body's; it is killed at once if the body was cancelled before."""
        with self._lock:
            self._worker = worker
            if self.is_cancelled:
                worker.kill()

    def end(self) -> bool:
        """The worker is this body's no more; returns whether it has not been killed."""
        with self._lock:
            self._worker = None
            return not self.is_cancelled

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._worker is not None:
                self._worker.kill()


class _WorkerPool:
    """The workers for bodies of one size; a body waits while all are busy, first come first served."""

    def __init__(self, limits: WorkerPoolLimits, fork: Callable[[WorkerLimits], Worker], max_waiting: int) -> None:
        self.limits = limits
        self._fork = fork
        self._threads = ThreadPoolExecutor(limits.max_workers, "prepare")  # each waits for one worker
        self._max_bodies = limits.max_workers + max_waiting
        self._num_bodies = 0
        self._idle: list[Worker] = []

    async def run(self, task: str, content: bytes) -> bytes:
        """Return a worker's result; cancelling kills the worker.

        Raises:
            Overloaded: too many bodies wait.
            WorkerEndedError: the body passed a limit.
            SandboxEndedError: no worker can be forked.
        """
        if self._num_bodies >= self._max_bodies:
            raise Overloaded(f"queue: expected fewer than {self._max_bodies} bodies to be prepared, got more")
        self._num_bodies += 1
        call = _Call()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, call, task, content)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._num_bodies -= 1

    def close(self) -> None:
        """Free the idle workers; those that are busy are freed when their calls end."""
        self._threads.shutdown(wait=False)
        while self._idle:
            self._idle.pop().close()

    def _run(self, call: _Call, task: str, content: bytes) -> bytes:
        try:
            idle = self._idle.pop()
        except IndexError:
            return self._call(call, self._fork(self.limits.limits), task, content)
        try:
            return self._call(call, idle, task, content)
        except WorkerEndedError as error:
            if error.status in EXCESS or call.is_cancelled:
                raise
            ended = describe_exit(error.status)  # killed from outside, perhaps before it saw the body
        worker = self._fork(self.limits.limits)
        logger.warning("a worker ended (%s): its body goes to another one", ended)
        return self._call(call, worker, task, content)

    def _call(self, call: _Call, worker: Worker, task: str, content: bytes) -> bytes:
        is_whole = False
        try:
            call.begin(worker)
            result = worker.call(task, content)
            is_whole = True
            return result
        finally:
            if call.end() and is_whole and self.limits.keeps_workers:
                self._idle.append(worker)
            else:
                worker.close()
