"""The engine process's main loop: take messages, step the engine, hand out outputs.

Every accepted request gets exactly one output with a finish_reason, whatever happens: it ends, it is aborted, the
server shuts down or the engine breaks. Aborts that have arrived take effect before the next step, and questions are
answered then. Submissions are read for a few milliseconds between two steps; what is left of a burst waits. The loop
blocks in the kernel while there is nothing to do. Knows no model, no process start and no HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterable

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.engine.ipc.client_table import ClientTable
from fastdeploy_sd.engine.ipc.inbox import Inbox
from fastdeploy_sd.engine.ipc.questions import Answer, Answers
from fastdeploy_sd.errors import FdsdError, InternalError, Unavailable
from fastdeploy_sd.types import FinishReason, Request, RequestId, RequestOutput
from fastdeploy_sd.wire.channel import ServerChannel
from fastdeploy_sd.wire.codec import ProtocolError

logger = logging.getLogger(__name__)

_ANNOUNCE_TIMEOUT_S = 2.0
# Between two steps; what takes longer waits for the next pause.
_RECEIVE_S, _SUBMIT_S = 0.005, 0.002
_BYE = m.encode(m.ClientDisconnect())


class EngineLoop:
    """Serves one engine to any number of clients over one channel. `run` belongs to one thread.

    Args:
        shutdown_timeout_s: how long the requests may take to finish after `drain`.
        receive_s: frames are taken from the channel for so long before a step.
        submit_s: submissions among them are read for so long, one at least.
    """

    def __init__(
        self,
        engine: Engine,
        channel: ServerChannel,
        shutdown_timeout_s: float,
        receive_s: float = _RECEIVE_S,
        submit_s: float = _SUBMIT_S,
    ) -> None:
        self._engine, self._channel = engine, channel
        self._shutdown_timeout_s, self._submit_s = shutdown_timeout_s, submit_s
        self._clients, self._answers = ClientTable(), Answers(engine)
        self._inbox = Inbox(channel, m.max_frame_bytes(engine.model_info), receive_s)
        self._is_drain_asked = self._is_end_asked = self._is_paused = False
        self._deadline: float | None = None  # of a drain
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        channel.watch(self._wake_read)
        for fd in (engine.arrival_fd, engine.failure_fd, self._answers.fd):
            if fd is not None:
                channel.watch(fd)

    def drain(self) -> None:
        """Have the loop take nothing new and end when its requests have. For signal handlers and other threads."""
        self._is_drain_asked = True
        self._wake()

    def end_now(self) -> None:
        """Have the loop end its requests with an error after the running step, and then itself. As `drain`."""
        self._is_end_asked = True
        self._wake()

    def run(self) -> int:
        """Serve until told to stop; return the exit status: 0 after a drain, 1 when the engine broke or lost blocks."""
        try:
            while not self._is_drained():
                readable = self._channel.wait(self._idle_s())
                if self._engine.failure_fd in readable:
                    raise InternalError("a part of the model has ended")
                self._begin_drain()
                self._take_messages(readable)
                self._end_at_deadline()
                if self._engine.has_work() or self._engine.arrival_fd in readable:
                    self._deliver(self._engine.step())
            self._announce_end("the server shut down")
            return self._audit()
        except Unavailable as error:  # the experts of another engine are lost, which its clients log
            self._announce_end(error.message)
            return 0 if self._is_drain_asked else 1
        except Exception:
            logger.exception("the engine failed; all its requests end with an error")
            self._announce_end("the engine failed", has_failed=True)
            return 1
        finally:
            self._close()

    def _idle_s(self) -> float | None:
        """How long nothing is to be done unless something comes: a message, KV, a signal; None = for ever."""
        if self._inbox or (self._engine.has_work() and not self._engine.is_stalled):
            return 0
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # already closed, or full: then it wakes anyway
            os.write(self._wake_write, b"\0")

    def _take_messages(self, readable: set[int]) -> None:
        if self._wake_read in readable:
            os.read(self._wake_read, 4096)
        for identity, frame in self._inbox.receive():
            self._take(identity, frame)
        for identity, answer in self._answers.take():
            self._answer(identity, answer)
        for identity in self._clients.ended(readable):
            logger.warning("a client process ended; its requests are aborted")
            self._drop(identity)
        if self._deadline is not None:
            self._reject_waiting(_draining())
        deadline = time.monotonic() + self._submit_s
        while self._inbox:
            self._take(*self._inbox.next_submission())
            if time.monotonic() >= deadline:
                break

    def _take(self, identity: bytes, frame: bytes) -> None:
        try:
            if self._inbox.is_too_long(frame):
                raise ProtocolError(
                    f"frame: expected no more than a request at every limit has, got {len(frame)} bytes"
                )
            message = m.decode(frame)
        except ProtocolError as error:
            logger.error("unreadable message: %s", error)
            self._send(identity, m.Fault(error.message))
            return
        if isinstance(message, m.ClientHello):
            self._greet(identity, message.pid)
            return
        if identity not in self._clients:
            self._send(identity, m.Fault(f"expected Hello first, got {type(message).__name__}"))
            return
        match message:
            case m.Submit(handle, request):
                self._submit(identity, handle, request)
            case m.Abort(handles, reason):
                self._abort(identity, handles, reason)
            case m.StatsRequest():
                self._tell_stats(identity, message)
            case m.ExpertsRequest() | m.AdapterRequest():
                self._answer(identity, self._answers.begin(identity, message))
            case m.ClientDisconnect():
                self._drop(identity)
            case _:
                self._send(identity, m.Fault(f"expected a client's message, got {type(message).__name__}"))

    def _greet(self, identity: bytes, pid: int) -> None:
        if identity not in self._clients:
            try:
                self._channel.watch(self._clients.add(identity, pid))
            except OSError as error:
                self._send(identity, m.Fault(f"process {pid} cannot be watched: {error}"))
                return
        self._send(identity, m.EngineReady(self._engine.model_info, os.getpid()))
        if self._deadline is not None or self._is_paused:
            self._send(identity, self._notice())

    def _submit(self, identity: bytes, handle: int, request: Request) -> None:
        try:
            if self._deadline is not None:
                raise _draining()
            self._engine.submit(request)
        except FdsdError as error:
            self._reject(identity, handle, error)
            return
        except Exception:  # an accident of this request; the engine's books have not changed
            logger.exception("request %s could not be taken", request.request_id)
            self._reject(identity, handle, InternalError("the request could not be taken"))
            return
        self._clients.own(request.request_id, identity, handle)

    def _notice(self) -> m.Notice:
        return m.Notice(self._deadline is not None, self._is_paused)

    def _tell_stats(self, identity: bytes, message: m.StatsRequest) -> None:
        if message.pauses is not None:
            self._is_paused = message.pauses
            self._broadcast(self._notice())
        self._send(identity, m.StatsReply(message.serial, self._engine.stats()))

    def _answer(self, identity: bytes, answer: Answer | None) -> None:
        if isinstance(answer, m.AdapterReply):
            self._broadcast(m.AdaptersChanged(self._engine.adapters.known))
        if answer is not None:
            self._send(identity, answer)

    def _reject_waiting(self, error: FdsdError) -> None:
        while self._inbox:
            identity, frame = self._inbox.next_submission()
            handle = m.handle_of_submit(frame)
            if identity in self._clients and handle is not None:
                self._reject(identity, handle, error)

    def _reject(self, identity: bytes, handle: int, error: FdsdError) -> None:
        self._send(identity, m.Rejected(handle, m.WireError.of(error)))

    def _abort(self, identity: bytes, handles: tuple[int, ...], reason: FinishReason) -> None:
        for frame in self._inbox.withdraw(identity, handles):
            self._take(identity, frame)  # it ends at once, but like any other
        self._deliver(self._engine.abort(self._clients.requests_of(identity, handles), reason))

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Send outputs to their owners, one message per client; those without an owner left have no reader."""
        by_client: dict[bytes, tuple[list[int], list[RequestOutput]]] = {}
        for output in outputs:
            if (owner := self._clients.owner(output.request_id)) is None:
                continue
            identity, handle = owner
            own_handles, own_outputs = by_client.setdefault(identity, ([], []))
            own_handles.append(handle)
            own_outputs.append(output)
            if output.finish_reason is not None:
                self._clients.release(output.request_id)
        for identity, (own_handles, own_outputs) in by_client.items():
            self._send(identity, m.Outputs(tuple(own_handles), tuple(own_outputs)))

    def _send(self, identity: bytes, message: m.Message) -> None:
        is_delivered = self._channel.send(identity, m.encode(message))
        if not is_delivered and identity in self._clients:
            logger.warning("a client is unreachable; its requests are aborted")
            self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        if identity in self._clients:
            self._engine.abort(self._forget(identity))

    def _forget(self, identity: bytes) -> list[RequestId]:
        self._inbox.drop(identity)
        self._channel.unwatch(self._clients.fd_of(identity))
        return self._clients.remove(identity)

    def _begin_drain(self) -> None:
        if self._deadline is None and (self._is_drain_asked or self._is_end_asked):
            self._deadline = time.monotonic() + self._shutdown_timeout_s
            logger.info("draining: %d requests may finish", len(self._clients.request_ids()))
            self._broadcast(self._notice())
            self._engine.drain()

    def _end_at_deadline(self) -> None:
        if self._is_end_asked or (self._deadline is not None and time.monotonic() >= self._deadline):
            outputs = self._engine.abort(self._clients.request_ids())
            self._engine.end()
            error = (Unavailable.__name__, "the server shut down before the request finished")
            self._deliver(dataclasses.replace(o, finish_reason=FinishReason.ERROR, error=error) for o in outputs)

    def _is_drained(self) -> bool:
        return self._deadline is not None and not self._engine.has_work()

    def _audit(self) -> int:
        try:
            self._engine.check_integrity()
        except AssertionError:
            logger.exception("the engine's books are wrong after its last request")
            return 1
        return 0

    def _announce_end(self, reason: str, *, has_failed: bool = False) -> None:
        """Make sure that every client has read what it was sent before this process can be seen to end.

        After a failure this is the answer to everything: the engine, whose state is unknown, is not touched.
        """
        gone, deadline = self._broadcast(m.EngineDead(reason, has_failed)), time.monotonic() + _ANNOUNCE_TIMEOUT_S
        while True:
            for identity in gone:
                if identity in self._clients:
                    self._forget(identity)
            left_s = deadline - time.monotonic()
            if not self._clients.identities() or left_s <= 0:
                return
            gone = self._clients.ended(self._channel.wait(left_s))
            gone += [identity for identity, frame in self._channel.receive() if frame == _BYE]

    def _broadcast(self, message: m.Message) -> list[bytes]:
        frame = m.encode(message)
        return [i for i in self._clients.identities() if not self._channel.send(i, frame)]

    def _close(self) -> None:
        for identity in self._clients.identities():
            self._forget(identity)
        self._channel.close(linger_s=0)
        self._answers.close()
        wake_write, self._wake_write = self._wake_write, -1  # a late signal must not write to a reused descriptor
        os.close(self._wake_read)
        os.close(wake_write)


def _draining() -> Unavailable:
    return Unavailable("the server is draining: it takes no new requests", code="draining")
