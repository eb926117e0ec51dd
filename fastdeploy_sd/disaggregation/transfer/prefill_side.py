"""A prefill instance's part of the conversation: decode instances, their windows, and the pages that go there.

Runs in the connector's thread. Pages wait for credit of their own receiver only, so one that reads slowly, or not at
all, holds up its own transfers only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from fastdeploy_sd.disaggregation.transfer import messages as m
from fastdeploy_sd.disaggregation.transfer.counters import Refusal
from fastdeploy_sd.disaggregation.transfer.events import PrefillCancelled, PrefillWanted, Sent, TransferId
from fastdeploy_sd.disaggregation.transfer.outgoing import Outgoing, Peer
from fastdeploy_sd.disaggregation.transfer.settings import TransferContext
from fastdeploy_sd.disaggregation.transports.cuda import CudaSender
from fastdeploy_sd.disaggregation.transports.ipc import DescriptorInbox, IpcSender
from fastdeploy_sd.disaggregation.transports.rdma import RdmaSender
from fastdeploy_sd.disaggregation.transports.tcp import TcpSender
from fastdeploy_sd.disaggregation.transports.transport import Sender, TransportError
from fastdeploy_sd.types.models import mismatch
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.sockets import Hub, Listener, SendResult

# Messages that may wait for a decode instance, in addition to those about its transfers.
_QUEUED_MESSAGES = 1000
_MAX_MENTIONED = 1000
_log = logging.getLogger(__name__)


class PrefillSide:
    """See the module. `num_steps` is the engine's, which counts them from its own thread."""

    def __init__(self, hub: Hub, instance: TransferContext) -> None:
        self._hub, self._instance, settings = hub, instance, instance.settings
        self._settings, self._description = settings, instance.description
        self._events, self._counters = instance.events, instance.counters
        num_queued = settings.max_transfers + _QUEUED_MESSAGES
        self._listener = Listener(hub, settings.host, settings.port, settings.max_message_bytes, num_queued)
        self.address = self._listener.address
        self._inbox = DescriptorInbox() if "ipc" in instance.protocols else None
        if self._inbox is not None:
            hub.watch(self._inbox.fd)
        self.num_steps = 0
        self._peers: dict[bytes, Peer] = {}
        self._owner: dict[TransferId, Peer] = {}
        self._mentioned: dict[str, str] = {}  # instance -> why it is refused, which is logged once

    def send(self, transfer_id: TransferId, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        peer = self._owner.get(transfer_id)
        if peer is None:
            return  # it was cancelled, or its receiver is gone
        peer.add_pages(peer.transfers[transfer_id], layer, first_block, block_ids)
        self._pump(peer)

    def end(self, end: m.TransferDone | m.TransferFailed) -> None:
        """Say `end` when the pages that wait are gone; a Failed does not wait for them."""
        peer = self._owner.get(end.transfer_id)
        if peer is None or peer.transfers[end.transfer_id].end is not None:
            return
        transfer = peer.transfers[end.transfer_id]
        if isinstance(end, m.TransferFailed):
            transfer.fail(end.reason)
        transfer.end = end
        self._settle(peer, transfer)

    def turn(self) -> None:
        if self._inbox is not None:
            self._inbox.accept()
        for identity, frame in self._listener.receive():
            try:
                self._handle(identity, m.decode_from_decode(frame))
            except ProtocolError as error:
                self._counters.num_refused[Refusal.MALFORMED] += 1
                self._say(identity, m.PeerRefused(error.message))
        for peer in list(self._peers.values()):
            if peer.sender is not None and peer.sender.fd is not None:
                self._pump(peer)

    def tick(self) -> None:
        """Drop peers that were silent for a lease, and transfers that are not waited for."""
        now, lease_s = time.monotonic(), self._settings.lease_s
        for peer in list(self._peers.values()):
            if now - peer.last_seen > lease_s:
                self._drop(peer, "no sign of life")
        for transfer_id, peer in list(self._owner.items()):
            if now - peer.transfers[transfer_id].renewed > lease_s:
                self._cancel(peer, transfer_id)

    @property
    def num_transfers(self) -> int:
        return len(self._owner)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer, "this instance ends")
        if self._inbox is not None:
            self._hub.unwatch(self._inbox.fd)
            self._inbox.close()
        self._listener.close()

    def _handle(self, identity: bytes, message: m.FromDecode) -> None:
        if isinstance(message, m.PeerHello):
            self._welcome(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            self._counters.num_refused[Refusal.UNEXPECTED] += 1
            self._say(identity, m.PeerRefused("expected Hello first"))
            return
        peer.last_seen = time.monotonic()
        handle: Callable[[Peer, m.FromDecode], None] = _HANDLERS[type(message)].__get__(self)
        handle(peer, message)

    def _welcome(self, identity: bytes, hello: m.PeerHello) -> None:
        reason = mismatch(hello.description, self._description)
        if reason is None and identity in self._peers:
            reason = "expected one Hello"
        if reason is None and len(self._peers) >= self._settings.max_peers:
            reason = f"expected at most {self._settings.max_peers} decode instances"
        if reason is not None:
            is_known = self._mentioned.get(hello.instance_id) == reason
            level = logging.DEBUG if is_known else logging.WARNING
            _log.log(level, "decode instance %s is refused: %s", hello.instance_id, reason)
            if len(self._mentioned) < _MAX_MENTIONED:
                self._mentioned[hello.instance_id] = reason
            self._say(identity, m.PeerRefused(reason))
            return
        num_layers = len(hello.description.page_bytes)
        self._peers[identity] = Peer(identity, hello.instance_id, num_layers, time.monotonic())
        name = self._inbox.name if self._inbox is not None else ""
        welcome = m.Welcome(self._settings.instance_id, self._description, self._instance.protocols, name)
        self._say(identity, welcome)

    def _open(self, peer: Peer, message: m.Open) -> None:
        try:
            if peer.sender is not None:
                raise TransportError("expected one Open, got another")
            if len(message.receivers) != 1:
                raise TransportError(f"expected one receiver, got {len(message.receivers)}")
            offer = message.receivers[0]
            if offer.slot_bytes < max(self._description.page_bytes[: peer.num_layers]):
                raise TransportError(f"expected slots of a page, got {offer.slot_bytes} bytes")
            if offer.num_slots * offer.slot_bytes > max(self._settings.window_bytes, 2 * offer.slot_bytes):
                raise TransportError(f"expected a window of at most {self._settings.window_bytes} bytes")
            sender = self._make_sender(message.protocol, offer)
        except TransportError as error:
            self._say(peer.identity, m.OpenFailed(str(error)))
            return
        peer.open(sender, message.protocol, offer.num_slots)
        if sender.fd is not None:
            self._hub.watch(sender.fd)
        self._say(peer.identity, m.Opened())

    def _make_sender(self, protocol: str, offer: m.Receiver) -> Sender:
        if protocol not in self._instance.protocols:
            raise TransportError(f"expected one of {', '.join(self._instance.protocols)}, got {protocol!r}")
        port = self._instance.pages.port
        if self._inbox is not None and port is not None and protocol == "cuda":
            return CudaSender(self._inbox.take(offer.token), offer, port)
        if self._inbox is not None and protocol == "ipc":
            return IpcSender(self._inbox.take(offer.token), offer)
        if self._instance.rdma is not None and protocol == "rdma":
            return RdmaSender(self._instance.rdma, offer)
        return TcpSender()

    def _fetch(self, peer: Peer, order: m.Fetch) -> None:
        num_blocks = -(-len(order.request.prompt_token_ids) // self._description.block_size)
        end_block = order.first_block + order.num_blocks
        reason = None
        if peer.sender is None:
            reason = "expected Open first"
        elif order.transfer_id in self._owner or end_block > num_blocks:
            reason = f"expected a new id and at most {num_blocks} blocks, got block {end_block - 1}"
        elif len(self._owner) >= self._settings.max_transfers:
            reason = f"expected at most {self._settings.max_transfers} transfers at once"
        if reason is not None:
            self._counters.num_refused[Refusal.UNEXPECTED] += 1
            if order.transfer_id not in self._owner:
                self._say(peer.identity, m.TransferFailed(order.transfer_id, reason))
            return
        now = time.monotonic()
        transfer = Outgoing(order.transfer_id, order.first_block, end_block, peer.num_layers, now, now)
        peer.transfers[order.transfer_id] = transfer
        self._owner[order.transfer_id] = peer
        self._events.put(PrefillWanted(order.transfer_id, order.request, order.first_block, order.num_blocks))

    def _cancelled(self, peer: Peer, message: m.Cancel) -> None:
        if message.transfer_id in peer.transfers:
            self._cancel(peer, message.transfer_id)

    def _credit(self, peer: Peer, message: m.Credit) -> None:
        if message.receiver != 0 or not peer.give_back(message.slots):
            self._counters.num_refused[Refusal.OUT_OF_BOUNDS] += 1
        self._pump(peer)

    def _renew(self, peer: Peer, message: m.Renew) -> None:
        for transfer_id in message.transfer_ids:
            if transfer_id in peer.transfers:
                peer.transfers[transfer_id].renewed = peer.last_seen
        known = tuple(transfer_id for transfer_id in message.transfer_ids if transfer_id in peer.transfers)
        self._say(peer.identity, m.Renewed(self.num_steps, known))

    def _pump(self, peer: Peer) -> None:
        """Announce what is placed, and start as many pages as there is credit for."""
        self._announce(peer)
        while peer.start(self._instance.pages):
            self._announce(peer)

    def _announce(self, peer: Peer) -> None:
        for batch in peer.placed():
            transfer: Outgoing = batch.owner
            if batch.error:
                transfer.fail(batch.error)
            elif transfer.transfer_id in peer.transfers:
                chunks = m.Chunks(transfer.transfer_id, 0, batch.layer, batch.blocks, batch.slots, batch.checksums)
                if self._say(peer.identity, chunks, batch.payloads):
                    way = self._counters.sent[peer.protocol]
                    way.num_pages += len(batch.blocks)
                    way.num_bytes += self._description.page_bytes[batch.layer] * len(batch.blocks)
            self._settle(peer, transfer)

    def _settle(self, peer: Peer, transfer: Outgoing) -> None:
        if not transfer.is_over or transfer.transfer_id not in peer.transfers:
            return
        assert transfer.end is not None, "only an end is settled"
        is_done = isinstance(transfer.end, m.TransferDone)
        if is_done:
            way = self._counters.sent[peer.protocol]
            way.num_transfers += 1
            way.seconds += time.monotonic() - transfer.start
        self._forget(peer, transfer.transfer_id, is_done=is_done)
        self._say(peer.identity, transfer.end)

    def _cancel(self, peer: Peer, transfer_id: TransferId) -> None:
        peer.transfers[transfer_id].pages.clear()
        self._events.put(PrefillCancelled(transfer_id))
        self._forget(peer, transfer_id, is_done=False)

    def _forget(self, peer: Peer, transfer_id: TransferId, *, is_done: bool) -> None:
        """Transports copy pages when they start, so nothing reads them once no more are started."""
        del peer.transfers[transfer_id], self._owner[transfer_id]
        self._counters.num_unsent += not is_done
        self._events.put(Sent(transfer_id))

    def _say(self, identity: bytes, message: m.FromPrefill, payloads: Sequence[bytearray] = ()) -> bool:
        delivery = self._listener.send(identity, m.encode(message), list(payloads))
        peer = self._peers.get(identity)
        if delivery is not SendResult.QUEUED and peer is not None:
            self._drop(peer, "the connection is lost" if delivery is SendResult.GONE else "it reads nothing")
        return delivery is SendResult.QUEUED

    def _drop(self, peer: Peer, why: str) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return
        _log.info("decode instance %s is dropped: %s", peer.instance_id, why)
        for transfer_id in list(peer.transfers):
            self._cancel(peer, transfer_id)
        if peer.sender is not None and peer.sender.fd is not None:
            self._hub.unwatch(peer.sender.fd)
        peer.close()


_HANDLERS: dict[type, Callable[..., None]] = {
    m.Open: PrefillSide._open,
    m.Fetch: PrefillSide._fetch,
    m.Cancel: PrefillSide._cancelled,
    m.Credit: PrefillSide._credit,
    m.Renew: PrefillSide._renew,
}
