"""A decode instance's part of the conversation: prefill instances, windows, and the orders.

Runs in the connector's thread. A connection is made for the first order, and again after it was lost; every loss ends
the orders of that instance at once, because the prompt can be computed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from fastdeploy_sd.disaggregation.transfer import messages as m
from fastdeploy_sd.disaggregation.transfer.counters import Failure, Refusal
from fastdeploy_sd.disaggregation.transfer.events import TransferId
from fastdeploy_sd.disaggregation.transfer.incoming import IncomingTable
from fastdeploy_sd.disaggregation.transfer.pages import Bytes
from fastdeploy_sd.disaggregation.transfer.settings import TransferContext
from fastdeploy_sd.disaggregation.transports.cuda import CudaReceiver, forget_windows
from fastdeploy_sd.disaggregation.transports.ipc import IpcReceiver
from fastdeploy_sd.disaggregation.transports.rdma import RdmaReceiver
from fastdeploy_sd.disaggregation.transports.tcp import TcpReceiver
from fastdeploy_sd.disaggregation.transports.transport import ReceiverEnd, TransportError, window_slots
from fastdeploy_sd.types.models import mismatch
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.sockets import Connection, Hub, is_loopback

# Messages that may wait in each direction, in addition to those that the window and the orders allow.
_QUEUED_MESSAGES = 1000
_HEADER_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class _Source:
    """A prefill instance while there is a connection to it; `choices` are protocols that may still be tried.

    `waiting` orders are sent once it `is_open`; `asked` is when the first unanswered sign of life was asked for.
    """

    def __init__(self, hub: Hub, address: str, max_frame_bytes: int, num_queued: int) -> None:
        self.address = address
        self.link = Connection(hub, address, max_frame_bytes, num_queued)
        self.choices: list[str] = []
        self.protocol = ""
        self.ipc_name = ""
        self.receiver: ReceiverEnd | None = None
        self.is_open = False
        self.waiting: list[m.Fetch] = []
        self.start = self.used = self.renewed = time.monotonic()
        self.num_steps = 0
        self.asked: float | None = None

    def close(self) -> None:
        self.link.close()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class DecodeSide:
    """See the module."""

    def __init__(self, hub: Hub, instance: TransferContext, table: IncomingTable) -> None:
        self._hub, self._instance, self._table = hub, instance, table
        self._settings, self._counters = instance.settings, instance.counters
        self._sources: dict[str, _Source] = {}
        self._failed: dict[str, tuple[float, str, Failure]] = {}  # address -> since when, why
        self._mentioned: dict[str, str] = {}  # address -> why it is refused, which is logged once
        self._slot_bytes = max(instance.description.page_bytes)
        self._num_slots = window_slots(self._slot_bytes, self._settings.window_bytes)

    def fetch(self, address: str, order: m.Fetch) -> None:
        """Order; the transfer is in the table already."""
        try:
            source = self._source(address)
        except (TransportError, OSError) as error:
            self._table.fail(order.transfer_id, str(error), Failure.UNREACHABLE)
            return
        if source is None:
            _, why, failure = self._failed[address]
            self._table.fail(order.transfer_id, why, failure)
            return
        source.used = time.monotonic()
        if source.is_open:
            self._say(source, order)
        else:
            source.waiting.append(order)

    def cancel(self, address: str, transfer_id: TransferId) -> None:
        """Tell its sender that it is not waited for any more."""
        source = self._sources.get(address)
        if source is None:
            return
        source.waiting = [order for order in source.waiting if order.transfer_id != transfer_id]
        if source.is_open:
            self._say(source, m.Cancel(transfer_id))

    def turn(self) -> None:
        for source in list(self._sources.values()):
            for parts in source.link.receive():
                if not self._obey(source, parts):
                    break
            else:
                why = source.link.loss()
                if why is not None:
                    self._lose(source, why, Failure.LOST if source.is_open else Failure.UNREACHABLE)

    def tick(self) -> None:
        """Keep deadlines and connections, and windows as long as others do; `turn` first, as what came counts."""
        now, limits = time.monotonic(), self._settings
        for transfer_id, address in self._table.expire():
            self.cancel(address, transfer_id)
        for source in list(self._sources.values()):
            ordered = self._table.of_source(source.address)
            source.used = now if ordered else source.used
            if not source.is_open and now - source.start > limits.handshake_s:
                text = f"no agreement within {limits.handshake_s:.1f} seconds"
                self._lose(source, text, Failure.UNREACHABLE)
            elif source.asked is not None and now - source.asked > limits.silence_s:
                self._lose(source, f"no sign of life for {limits.silence_s:.1f} seconds", Failure.LOST)
            elif now - source.used > limits.idle_s:
                self._close(source)
            elif source.is_open and now - source.renewed >= limits.renew_s:
                source.renewed = now
                source.asked = source.asked or now
                self._say(source, m.Renew(tuple(ordered)))
        self._failed = {a: entry for a, entry in self._failed.items() if now - entry[0] < limits.retry_s}
        forget_windows()  # an instance that was suspended may close one long after it was lost

    def close(self) -> None:
        for source in list(self._sources.values()):
            self._close(source)

    def _source(self, address: str) -> _Source | None:
        """Return the connection to an address, a new one if need be; None when it failed a moment ago."""
        known = self._sources.get(address)
        if known is not None or address in self._failed:
            return known
        if self._settings.is_local and not is_loopback(address):
            raise TransportError(f"pd_secret: expected one for {address}, which is not a loopback address")
        max_frame = max(self._slot_bytes, _HEADER_BYTES)
        source = _Source(
            self._hub, address, max_frame, self._num_slots + self._settings.max_transfers + _QUEUED_MESSAGES
        )
        self._sources[address] = source
        instance = self._instance
        self._say(source, m.PeerHello(self._settings.instance_id, instance.description, instance.protocols))
        return source

    def _obey(self, source: _Source, parts: list[memoryview]) -> bool:
        source.asked = None
        try:
            message = m.decode_from_prefill(bytes(parts[0]))
        except ProtocolError as error:
            self._counters.num_refused[Refusal.MALFORMED] += 1
            self._lose(source, error.message, Failure.LOST)
            return False
        handle = _HANDLERS.get(type(message))
        if isinstance(message, m.Chunks):
            self._chunks(source, message, parts[1:])
        elif handle is not None:
            handle(self, source, message)
        return source.address in self._sources

    def _welcome(self, source: _Source, message: m.Welcome) -> None:
        reason = mismatch(self._instance.description, message.description)
        if reason is not None:
            self._lose(source, reason, Failure.REFUSED)
            return
        ours = self._instance.protocols
        common = [p for p in ours if p in message.protocols]
        source.choices = sorted(common, key=lambda p: (p != "cuda", p != "ipc"))  # memory is faster than any network
        source.ipc_name = message.ipc_name
        self._offer(source, f"expected one of {', '.join(ours)}, got {', '.join(message.protocols)}")

    def _offer(self, source: _Source, why: str) -> None:
        """Offer a window by the best protocol that is left; without one the source is refused, with the last reason."""
        while source.choices:
            source.protocol = protocol = source.choices.pop(0)
            try:
                source.receiver = self._make_receiver(protocol, source)
            except (TransportError, OSError) as error:
                why = str(error)
                continue
            self._say(source, m.Open(protocol, (source.receiver.offer,)))
            return
        self._lose(source, f"cache_transfer_protocol: no way in common: {why}", Failure.REFUSED)

    def _make_receiver(self, protocol: str, source: _Source) -> ReceiverEnd:
        if protocol in ("cuda", "ipc"):
            sizes, port = (self._num_slots, self._slot_bytes), self._instance.pages.port
            receiver = CudaReceiver(*sizes, port) if protocol == "cuda" and port is not None else IpcReceiver(*sizes)
            try:
                receiver.hand_over(source.ipc_name)
            except TransportError:
                receiver.close()
                raise
            return receiver
        if self._instance.rdma is not None and protocol == "rdma":
            return RdmaReceiver(self._instance.rdma, self._num_slots, self._slot_bytes)
        return TcpReceiver(self._num_slots, self._slot_bytes)

    def _open_failed(self, source: _Source, message: m.OpenFailed) -> None:
        if source.receiver is not None:
            source.receiver.close()
            source.receiver = None
        self._offer(source, message.reason)

    def _opened(self, source: _Source, _message: m.Opened) -> None:
        self._mentioned.pop(source.address, None)
        source.is_open = source.receiver is not None
        waiting, source.waiting = source.waiting, []
        for order in waiting:
            if self._table.waits_for(order.transfer_id):
                self._say(source, order)

    def _refused(self, source: _Source, message: m.PeerRefused) -> None:
        self._lose(source, message.reason, Failure.REFUSED)

    def _alive(self, source: _Source, message: m.Renewed) -> None:
        if message.num_steps != source.num_steps:
            source.num_steps = message.num_steps
            self._table.note_progress(source.address, message.transfer_ids)

    def _done(self, source: _Source, message: m.TransferDone) -> None:
        if source.is_open:
            way = self._counters.received[source.protocol]
            self._table.finish(message.transfer_id, source.address, message.drafts, way)
        else:
            self._counters.num_refused[Refusal.UNEXPECTED] += 1

    def _gave_up(self, source: _Source, message: m.TransferFailed) -> None:
        self._table.give_up(message.transfer_id, source.address, message.reason)

    def _chunks(self, source: _Source, chunks: m.Chunks, payloads: list[memoryview]) -> None:
        description = self._instance.description
        is_sound = source.is_open and chunks.receiver == 0 and len(payloads) in (0, len(chunks.slots))
        if not is_sound or not 0 <= chunks.layer < len(description.page_bytes):
            self._counters.num_refused[Refusal.OUT_OF_BOUNDS] += 1
            return
        assert source.receiver is not None, "an open source has a window"
        frames: list[Bytes | None] = [np.frombuffer(payload, np.uint8) for payload in payloads]
        size, way = description.page_bytes[chunks.layer], self._counters.received[source.protocol]
        each = zip(chunks.blocks, chunks.slots, chunks.checksums, frames or [None] * len(chunks.slots), strict=True)
        for block, slot, checksum, frame in each:
            page = source.receiver.page(slot, size, frame)
            if page is None:
                self._counters.num_refused[Refusal.OUT_OF_BOUNDS] += 1
            elif not self._table.receive(chunks.transfer_id, source.address, chunks.layer, block, page, checksum):
                way.num_pages += 1
                way.num_bytes += page.nbytes
        source.receiver.settle()
        self._say(source, m.Credit(0, chunks.slots))

    def _say(self, source: _Source, message: m.FromDecode) -> None:
        if source.address in self._sources and not source.link.send(m.encode(message)):
            self._lose(source, "it reads nothing", Failure.LOST)

    def _lose(self, source: _Source, why: str, failure: Failure) -> None:
        if self._sources.get(source.address) is not source:
            return
        is_known = failure is Failure.REFUSED and self._mentioned.get(source.address) == why
        _log.log(logging.DEBUG if is_known else logging.WARNING, "prefill instance %s is lost: %s", source.address, why)
        if failure is Failure.REFUSED:
            self._mentioned[source.address] = why
        self._close(source)
        self._failed[source.address] = (time.monotonic(), why, failure)
        self._table.fail_source(source.address, why, failure)

    def _close(self, source: _Source) -> None:
        del self._sources[source.address]
        source.close()


_HANDLERS: dict[type, Callable[..., None]] = {
    m.Welcome: DecodeSide._welcome,
    m.PeerRefused: DecodeSide._refused,
    m.Opened: DecodeSide._opened,
    m.OpenFailed: DecodeSide._open_failed,
    m.Renewed: DecodeSide._alive,
    m.TransferDone: DecodeSide._done,
    m.TransferFailed: DecodeSide._gave_up,
}
