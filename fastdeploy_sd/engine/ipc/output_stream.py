"""OutputStream: the outputs of one request on their way from the receiver task to the task that reads them."""

from __future__ import annotations

import asyncio

from fastdeploy_sd.errors import ERROR_TYPES, FdsdError, InternalError
from fastdeploy_sd.types import FinishReason, RequestId, RequestOutput


class OutputStream:
    """A queue with one reader and a definite end, which `is_ended` says has arrived, read or not.

    It holds at most the request's own tokens, so a reader that stalls costs a bounded amount of memory and delays
    no other request.
    """

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.is_ended = False
        self._queue: asyncio.Queue[RequestOutput | FdsdError] = asyncio.Queue()

    @property
    def is_exhausted(self) -> bool:
        return self.is_ended and self._queue.empty()

    def put(self, item: RequestOutput | FdsdError, is_last: bool) -> None:
        """Add an output or the error that ends the request; what comes after the last one is ignored."""
        if not self.is_ended:
            self._queue.put_nowait(item)
            self.is_ended = is_last

    async def next(self) -> RequestOutput:
        """Wait for the next output. Other tasks have their turn first, also where it is there: outputs with many
        alternatives take their time to write, and there may be thousands.
        """
        if not self._queue.empty():
            await asyncio.sleep(0)
        item = await self._queue.get()
        if isinstance(item, FdsdError):
            raise item
        if item.finish_reason is FinishReason.ERROR:
            kind, text = item.error or (InternalError.__name__, "the request failed")
            raise ERROR_TYPES.get(kind, InternalError)(text)
        return item
