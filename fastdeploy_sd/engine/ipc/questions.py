"""Questions of a client to the engine, and their answers on both sides."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.errors import BadRequest, FdsdError, InternalError, Unavailable, shown
from fastdeploy_sd.process.background import BackgroundCalls

if TYPE_CHECKING:
    from fastdeploy_sd.engine.engine import Engine

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
# Reading an adapter's files, some hundred MB.
LOAD_TIMEOUT_S = 120.0


class Questions:
    """What a client has asked and the engine has not answered; by serial numbers, which no submission has."""

    def __init__(self, next_serial: Callable[[], int], send: Callable[[m.Message], None]) -> None:
        self._next_serial, self._send = next_serial, send
        self._futures: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, question: Callable[[int], m.Message], timeout_s: float | None = None) -> Any:
        """Send what `question` makes of a serial number, and return the answer; Unavailable: it takes too long."""
        serial = self._next_serial()
        future = self._futures[serial] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(serial))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            text = f"the engine has not answered for {timeout_s:g} s"
            raise Unavailable(text, code="engine_busy") from None
        finally:
            del self._futures[serial]

    def answer(self, serial: int, value: object) -> None:
        """Hand an answer to who waits for it, if anyone does; an FdsdError is raised there."""
        future = self._futures.get(serial)
        if future is None or future.done():
            return
        if isinstance(value, FdsdError):
            future.set_exception(value)
        else:
            future.set_result(value)

    def fail(self, error: FdsdError) -> None:
        """Answer everything with an error."""
        for serial in list(self._futures):
            self.answer(serial, copy.copy(error))  # each is raised, and so changed, on its own


Answer = m.ExpertsReply | m.AdapterReply | m.Rejected


class Answers:
    """Does what clients ask of an engine between two steps. The files of adapters are read while steps run.

    Attributes:
        fd: readable while `take` has something to return.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._calls = engine, BackgroundCalls()
        self.fd, self.close = self._calls.fd, self._calls.close
        self._loads: dict[Future[str], tuple[bytes, m.AdapterRequest]] = {}

    def begin(self, identity: bytes, message: m.ExpertsRequest | m.AdapterRequest) -> Answer | None:
        """Return the answer to a client; None = `take` will."""
        try:
            if isinstance(message, m.ExpertsRequest):
                return self._experts(message)
            if message.folder is None:
                return m.AdapterReply(message.handle, self._engine.adapters.unload(message.name))
            read = self._engine.adapters.begin(message.name, Path(message.folder))
        except FdsdError as error:
            return m.Rejected(message.handle, m.WireError.of(error))
        self._loads[self._calls.start(read, "fdsd-adapter-digest")] = identity, message
        return None

    def take(self) -> list[tuple[bytes, Answer]]:
        """Return, once each, the answers that `begin` has left open, and the clients that asked."""
        return [self._end(call) for call in self._calls.take()]

    def _experts(self, message: m.ExpertsRequest) -> m.ExpertsReply:
        if (experts := self._engine.experts) is None:
            raise BadRequest("experts: expected a model whose experts are spread over ranks, got another")
        if message.rearranges:
            experts.rearrange()
        return m.ExpertsReply(message.handle, experts.report(clears=message.clears))

    def _end(self, call: Future[str]) -> tuple[bytes, Answer]:
        identity, message = self._loads.pop(call)
        try:
            source = self._engine.adapters.end(message.name, Path(message.folder or ""), call.result)
        except FdsdError as error:
            return identity, m.Rejected(message.handle, m.WireError.of(error))
        except Exception:  # an accident of this adapter; the engine's books have not changed
            logger.exception("adapter %s could not be read", shown(message.name))
            failure = m.WireError.of(InternalError("the adapter could not be read"))
            return identity, m.Rejected(message.handle, failure)
        return identity, m.AdapterReply(message.handle, source)
