"""EngineClient: the HTTP side's handle on the engine process. Knows sockets through channel.py only, and no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace

from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.engine.ipc.output_stream import OutputStream
from fastdeploy_sd.engine.ipc.questions import LOAD_TIMEOUT_S, TIMEOUT_S, Questions
from fastdeploy_sd.errors import ENGINE_FAILED, FdsdError, InternalError, Unavailable, paused
from fastdeploy_sd.process.liveness import LivenessProbe
from fastdeploy_sd.types import AdapterSource, FinishReason, ModelInfo, Request, RequestId, RequestOutput
from fastdeploy_sd.types.experts import ExpertReport
from fastdeploy_sd.types.stats import EngineState, EngineStats
from fastdeploy_sd.wire.channel import ClientChannel
from fastdeploy_sd.wire.codec import ProtocolError

logger = logging.getLogger(__name__)

_FLUSH_S = 0.5
_HELLO_S = 0.5  # one that is sent to a process which is just ending is lost
_ENDED = "the engine's process ended"


class EngineClient:
    """Submits requests to the engine process and hands their outputs to the tasks that wait for them.

    Belongs to one event loop. When the engine's process ends, for whatever reason, every waiting `generate`,
    `stats` and `experts` raises Unavailable at once and `is_alive` turns False for good.

    With a timeout the engine is asked for its statistics about every second. One that neither answers nor works for so
    long counts as ended, and `on_silence` is called with its process id. Not so while `may_wait` returns True. `heart`
    asks, from `connect` on.
    """

    def __init__(self, address: str, timeout_s: float | None = None) -> None:
        self._address, self._timeout_s = address, timeout_s
        self.on_silence: Callable[[int], None] = lambda pid: None
        self.may_wait: Callable[[], bool] = lambda: False
        self.heart: LivenessProbe | None = None
        self.last_stats: EngineStats | None = None  # None = it has not told any yet
        self._channel: ClientChannel | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[m.EngineReady] | None = None
        self._model_info: ModelInfo | None = None
        self._engine_fd: int | None = None
        self._end_reason: str | None = None  # why the engine is gone
        self._ended = asyncio.Event()
        self.wait_ended = self._ended.wait
        self._is_draining = False
        self.is_paused = False  # by an operator: it shall get nothing new
        self._streams: dict[int, OutputStream] = {}
        self._serials = itertools.count()
        self._questions = Questions(self._serials.__next__, self._send)

    async def connect(self) -> None:
        """Wait until an engine is there and has loaded its model; without limit, as loading may take minutes."""
        self._ready = asyncio.get_running_loop().create_future()
        self._channel = channel = ClientChannel(self._address)
        self._receiver = asyncio.create_task(self._receive(channel))
        while not self._ready.done():
            channel.send(m.encode(m.ClientHello(os.getpid())))
            await asyncio.wait({self._ready}, timeout=_HELLO_S)
        ready = await self._ready
        self._model_info = ready.model_info
        if self._timeout_s is not None:
            silent = functools.partial(self._note_silence, ready.pid)
            self.heart = LivenessProbe(ready.pid, self._ask_stats, self._timeout_s, silent, self.may_wait)

    async def close(self) -> None:
        """Abort what is left, end the conversation and free the socket. May be called twice."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        is_alive = self._end_reason is None
        if is_alive:
            channel.send(m.encode(m.ClientDisconnect()))
        self._close_with("the client is closed")
        if self.heart is not None:
            await self.heart.stop()
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        channel.close(linger_s=_FLUSH_S if is_alive else 0)

    @property
    def model_info(self) -> ModelInfo:
        """The loaded model; raises Unavailable before `connect` has returned."""
        if self._model_info is None:
            raise Unavailable("the engine is not ready")
        return self._model_info

    @property
    def state(self) -> EngineState:
        """How the engine is doing."""
        taking = "paused" if self.is_paused else "ready"
        name = "draining" if self._is_draining else taking if self.is_alive else "down"
        return EngineState(name, self.silence_s, self.last_stats)

    @property
    def num_requests(self) -> int:
        """Requests of this client whose reader waits for more."""
        return len(self._streams)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is loaded and its process runs."""
        return self._model_info is not None and self._end_reason is None

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last sign of life; of a loaded engine that works or waits, one or two at most."""
        return 0.0 if self.heart is None else self.heart.signs.age_s

    def begin_drain(self) -> None:
        """Take no new requests from now on, also before the engine has announced its drain."""
        self._is_draining = self._is_draining or self._end_reason is None

    def verify_takes_requests(self) -> None:
        """Raise Unavailable, with `code` "engine_down", "draining" or "paused", unless it shall get new requests."""
        self._verify_runs()
        if self.is_paused:
            raise paused("the engine")

    def _verify_runs(self) -> None:
        if self._is_draining or not self.is_alive:
            raise self._ended_with("the server is draining" if self._is_draining else "the engine is down")

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield what each step adds to it; the last output carries the finish_reason.

        Closing the iterator early (`aclose`) or cancelling the task that awaits it aborts the request at once; its id
        is free again immediately. Raises the FdsdError that tells the user what happened: BadRequest or Overloaded
        when the engine does not take it, Unavailable when that ends or falls silent, InternalError when it broke.
        """
        self._verify_runs()  # a pause is for those who take requests in: this one may be a part of what has begun
        handle = next(self._serials)
        stream = self._streams[handle] = OutputStream(request.request_id)
        try:
            self._send(m.Submit(handle, request))
            while not stream.is_exhausted:
                yield await stream.next()
        finally:
            del self._streams[handle]
            if not stream.is_ended and self._end_reason is None:
                self._send(m.Abort((handle,)))

    async def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests now: their `generate` yields a last output with this reason. Unknown ids are ignored."""
        wanted = frozenset(request_ids)
        handles = tuple(handle for handle, stream in self._streams.items() if stream.request_id in wanted)
        if handles and self._end_reason is None:
            self._send(m.Abort(handles, reason))

    async def stats(self) -> EngineStats:
        """Return the engine's statistics as of its next pause between two steps; raises Unavailable after seconds."""
        return await self._ask_stats(TIMEOUT_S)

    async def experts(self, *, rearranges: bool = False, clears: bool = False) -> ExpertReport:
        """Return where experts are, as `stats`; see SpreadExperts. Raises BadRequest: there are none to speak of, or
        they cannot be placed anew.
        """
        report: ExpertReport = await self._questions.ask(
            lambda handle: m.ExpertsRequest(handle, rearranges, clears), TIMEOUT_S
        )
        return report

    async def change_adapter(self, name: str, folder: str | None) -> AdapterSource:
        """Have an adapter loaded from a folder, or unloaded if that is None; raises as AdapterRegistry."""
        source: AdapterSource = await self._questions.ask(
            lambda handle: m.AdapterRequest(handle, name, folder), LOAD_TIMEOUT_S
        )
        return source

    async def set_paused(self, *, is_paused: bool) -> None:
        """Have all clients of the engine send nothing new, or again; raises as `stats`."""
        await self._questions.ask(lambda serial: m.StatsRequest(serial, is_paused), TIMEOUT_S)

    async def _ask_stats(self, timeout_s: float | None = None) -> EngineStats:
        stats: EngineStats = await self._questions.ask(m.StatsRequest, timeout_s)
        return stats

    def _send(self, message: m.Message) -> None:
        if self._end_reason is not None:
            raise self._ended_with(self._end_reason)
        if self._channel is None:
            raise Unavailable("the engine is not connected")
        self._channel.send(m.encode(message, self._model_info))

    async def _receive(self, channel: ClientChannel) -> None:
        while True:
            await asyncio.sleep(0)  # other tasks have their turn also while frames are waiting
            frame = await channel.receive()
            if self.heart is not None:
                self.heart.signs.note()
            try:
                self._take(m.decode(frame))
            except ProtocolError as error:
                self._fail_conversation(f"a message from the engine could not be read: {error.message}")

    def _take(self, message: m.Message) -> None:
        if self._end_reason is not None:
            return  # everyone has been answered
        match message:
            case m.Outputs(handles, outputs):
                for handle, output in zip(handles, outputs, strict=True):
                    self._put(handle, output, is_last=output.finish_reason is not None)
            case m.Rejected(handle, error):
                self._reject(handle, error.to_exception())
            case m.StatsReply() | m.ExpertsReply() | m.AdapterReply():
                self._answer(message)
            case m.EngineReady() | m.AdaptersChanged():
                self._note_model(message)
            case m.Notice(is_draining, is_paused):
                self._is_draining, self.is_paused = self._is_draining or is_draining, is_paused
            case m.EngineDead(reason, has_failed):
                self._send(m.ClientDisconnect())
                self._close_with(reason, InternalError(reason, code=ENGINE_FAILED) if has_failed else None)
            case m.Fault(reason):
                self._fail_conversation(f"the engine could not read a message: {reason}")
            case _:
                raise ProtocolError(f"expected an engine's message, got {type(message).__name__}")

    def _note_model(self, message: m.EngineReady | m.AdaptersChanged) -> None:
        if isinstance(message, m.AdaptersChanged):
            if self._model_info is not None:
                self._model_info = replace(self._model_info, adapters=message.adapters)
            return
        self._watch_engine(message.pid)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(message)

    def _answer(self, reply: m.StatsReply | m.ExpertsReply | m.AdapterReply) -> None:
        if isinstance(reply, m.StatsReply):
            self.last_stats = reply.stats
        match reply:
            case m.StatsReply(serial, found) | m.ExpertsReply(serial, found) | m.AdapterReply(serial, found):
                self._questions.answer(serial, found)

    def _reject(self, handle: int, error: FdsdError) -> None:
        self._questions.answer(handle, error)
        self._put(handle, error, is_last=True)

    def _note_silence(self, pid: int, silence_s: float) -> None:
        if self._end_reason is None:
            reason = f"the engine has given no sign of life for {silence_s:.0f} s"
            logger.error("%s: its requests end with an error", reason)
            self._close_with(reason)
            self.on_silence(pid)

    def _put(self, handle: int, item: RequestOutput | FdsdError, is_last: bool) -> None:
        if (stream := self._streams.get(handle)) is not None:  # else its reader has left
            stream.put(item, is_last)

    def _watch_engine(self, pid: int) -> None:
        if self._engine_fd is not None:
            return
        try:
            self._engine_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._close_with(_ENDED)
        else:
            asyncio.get_running_loop().add_reader(self._engine_fd, self._close_with, _ENDED)

    def _fail_conversation(self, reason: str) -> None:
        """A message was lost, and it is unknown whose: end everything that waits, which might wait for ever."""
        logger.error("%s", reason)
        if self._end_reason is None:
            self._send(m.Abort(tuple(handle for handle, stream in self._streams.items() if not stream.is_ended)))
            self._fail_waiting(InternalError("the conversation with the engine broke"))

    def _close_with(self, reason: str, error: FdsdError | None = None) -> None:
        """The engine is gone: answer everyone who waits, once, requests with this error if there is one."""
        if self._engine_fd is not None:
            asyncio.get_running_loop().remove_reader(self._engine_fd)
            os.close(self._engine_fd)
            self._engine_fd = None
        if self._end_reason is None:
            self._end_reason = reason
            self._ended.set()
            self._fail_waiting(self._ended_with(reason), error)

    def _ended_with(self, reason: str) -> Unavailable:
        return Unavailable(reason, code="draining" if self._is_draining else "engine_down")

    def _fail_waiting(self, error: FdsdError, of_requests: FdsdError | None = None) -> None:
        for stream in self._streams.values():
            stream.put(copy.copy(of_requests or error), is_last=True)  # each is raised, and so changed, on its own
        self._questions.fail(error)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(copy.copy(error))
