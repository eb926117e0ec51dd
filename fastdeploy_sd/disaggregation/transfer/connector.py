"""The KV connector: the engine's way to the other instances. A thread of its own does everything that may wait."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Sequence

from fastdeploy_sd.disaggregation.transfer import messages as m
from fastdeploy_sd.disaggregation.transfer.counters import Counters
from fastdeploy_sd.disaggregation.transfer.decode_side import DecodeSide
from fastdeploy_sd.disaggregation.transfer.events import Event, EventQueue, TransferId
from fastdeploy_sd.disaggregation.transfer.incoming import IncomingTable
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.disaggregation.transfer.prefill_side import PrefillSide
from fastdeploy_sd.disaggregation.transfer.settings import ConnectorSettings, TransferContext
from fastdeploy_sd.disaggregation.transports.rdma import NUM_WINDOWS, RdmaEngine
from fastdeploy_sd.disaggregation.transports.transport import TransportError, window_slots
from fastdeploy_sd.errors import ConfigError, DeviceLost, device_lost_as_error
from fastdeploy_sd.types import KvDescription, KvSource, Request
from fastdeploy_sd.types.stats import TransferStats
from fastdeploy_sd.wire.sockets import CurveKeys, Hub, is_loopback, resolve

_TICK_S, _IDLE_TICK_S = 0.1, 1.0
_CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class KvConnector:
    """Moves KV pages between this instance and others. Methods return at once; `take_events` tells what happened.

    A prefill instance binds its port here. Its engine answers each PrefillWanted by any number of `send` and one of
    `finish` and `fail`, and keeps the pages until `Sent`. A decode instance's engine ends each `fetch` by an event or
    by `cancel`.

    Attributes:
        fd: readable while events wait.
        address: where a prefill instance takes orders, "tcp://host:port"; "" on a decode instance.

    Raises:
        ConfigError: the address cannot be bound, is not a loopback one without `pd_secret`, or no protocol works here.
    """

    def __init__(self, settings: ConnectorSettings, description: KvDescription, pages: Pages) -> None:
        _verify_host(settings)
        self._is_closed, self._pages = False, pages
        self.counters = Counters()
        self._events = EventQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fd, self.description = self._events.fd, description
        self._table = IncomingTable(pages, self._events, self.counters)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._hub = Hub(CurveKeys.of(settings.server_key, settings.client_key))
        self._rdma = _rdma_engine(settings, description)
        instance = TransferContext(settings, description, pages, self._events, self.counters, self._rdma)
        try:
            _verify_protocols(instance)
            self._prefill = PrefillSide(self._hub, instance) if settings.role == "prefill" else None
        except ConfigError:
            self._release()
            os.close(self._wake)
            raise
        self.address = self._prefill.address if self._prefill is not None else ""
        self._decode = DecodeSide(self._hub, instance, self._table)
        self._hub.watch(self._wake)
        self._thread = threading.Thread(target=self._run, name="fdsd-kv", daemon=True)
        self._thread.start()

    def take_events(self) -> list[Event]:
        """Return what happened since the last call, oldest first; nothing after `close`."""
        with device_lost_as_error():
            return [] if self._is_closed else self._table.take_events()

    def stats(self) -> TransferStats:
        return self.counters.stats()

    def fetch(
        self, request: Request, source: KvSource, first_block: int, block_ids: Sequence[int], timeout_s: float
    ) -> TransferId:
        """Order the pages of a request's prompt from `first_block` on into blocks of ours.

        `block_ids`: as many for every KV group, one group after the other; negative = the page is not wanted.

        A Fetched or FetchFailed follows, a moment after `timeout_s` without progress of who sends them at the latest,
        unless `cancel` is called before.
        """
        transfer_id = secrets.token_hex(16)
        bare = dataclasses.replace(request, kv_source=None)  # its source orders it from no other in turn
        num_blocks = len(block_ids) // (max(self._pages.groups) + 1)
        order = m.Fetch(transfer_id, bare, first_block, num_blocks, timeout_s)
        with device_lost_as_error():
            self._table.add(transfer_id, source.address, first_block, block_ids, timeout_s)
        self._command(lambda: self._decode.fetch(source.address, order))
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        """Give a transfer up: when this returns nothing is being written for it, and no event of it follows."""
        with device_lost_as_error():
            address = self._table.cancel(transfer_id)
        if address is not None:
            self._command(lambda: self._decode.cancel(address, transfer_id))

    def send(self, transfer_id: TransferId, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Send the pages of consecutive blocks of the prompt in a layer, now that they are computed.

        Blocks and layers that were not ordered are left out, and so is everything of a transfer that has ended.
        """
        prefill, blocks = self._prefill_side(), tuple(block_ids)
        with device_lost_as_error():
            self._pages.follow_steps()
        self._command(lambda: prefill.send(transfer_id, layer, first_block, blocks))

    def note_step(self) -> None:
        """The engine has computed a step, be it for others or itself: those who wait for their turn go on waiting."""
        self._prefill_side().num_steps += 1

    def finish(self, transfer_id: TransferId, drafts: tuple[int, ...]) -> None:
        """End a transfer: all pages were given to `send`. drafts: the first output token and the drafts after it."""
        prefill = self._prefill_side()
        self._command(lambda: prefill.end(m.TransferDone(transfer_id, drafts)))

    def fail(self, transfer_id: TransferId, reason: str) -> None:
        prefill = self._prefill_side()
        self._command(lambda: prefill.end(m.TransferFailed(transfer_id, reason)))

    def close(self) -> None:
        """End everything without events and give it back. When it returns, pages are not touched any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._commands.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("the KV connector did not end within %.0f seconds", _CLOSE_TIMEOUT_S)
            return
        os.close(self._wake)  # not by the thread, which may have ended before the write

    def _prefill_side(self) -> PrefillSide:
        assert self._prefill is not None, "only a prefill instance sends"
        return self._prefill

    def _command(self, command: Callable[[], None]) -> None:
        if self._is_closed:
            return
        self._commands.put(command)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        sides = [side for side in (self._prefill, self._decode) if side is not None]
        while True:
            try:
                self._hub.wait(_TICK_S if self._is_busy() else _IDLE_TICK_S)
                if not self._obey_engine():
                    break
                for side in sides:
                    side.turn()
                for side in sides:
                    side.tick()
            except Exception:
                # Whatever it was, the engine must not wait for what cannot come any more.
                _log.exception("the KV connector failed; its transfers end")
                self._decode.close()
                self._table.fail_all("the KV connector failed")
            except DeviceLost as lost:
                self._events.fail(lost)
                while self._commands.get() is not None:  # until `close`
                    pass
                break
        for side in sides:
            side.close()
        self._release()

    def _is_busy(self) -> bool:
        return len(self._table) > 0 or (self._prefill is not None and self._prefill.num_transfers > 0)

    def _obey_engine(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(self._commands.qsize()):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _release(self) -> None:
        self._hub.close()
        if self._rdma is not None:
            self._rdma.close()
        self._events.close()


def _verify_host(settings: ConnectorSettings) -> None:
    try:
        is_allowed = not settings.is_local or settings.role != "prefill" or is_loopback(resolve(settings.host))
    except OSError as error:
        raise ConfigError(f"pd_host: expected an address, got {settings.host!r}: {error}", param="pd_host") from None
    if not is_allowed:
        text = f"pd_secret: expected one for address {settings.host}, which others than this machine reach, got none"
        raise ConfigError(text, param="pd_secret")


def _rdma_engine(settings: ConnectorSettings, description: KvDescription) -> RdmaEngine | None:
    """Return the engine of rdma if it was asked for; where it does not work the log says why."""
    if "rdma" not in settings.protocols:
        return None
    slot_bytes = max(description.page_bytes)
    try:
        window_bytes = window_slots(slot_bytes, settings.window_bytes) * slot_bytes
        num_windows = NUM_WINDOWS if settings.role == "decode" else 0
        return RdmaEngine(settings.host, settings.rdma_ports, num_windows, window_bytes)
    except TransportError as error:
        _log.warning("cache_transfer_protocol: left out: %s", error)
        return None


def _verify_protocols(instance: TransferContext) -> None:
    if not instance.protocols:
        asked = ", ".join(instance.settings.protocols)
        text = f"cache_transfer_protocol: expected one that works here, got {asked}; the log says why it does not"
        raise ConfigError(text, param="cache_transfer_protocol")
