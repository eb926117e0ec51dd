"""What decode and prefill instances say to each other, as frames of a Protocol. Knows no socket.

    decode                          prefill
    PeerHello            ->             Welcome, or PeerRefused
    Open             ->             Opened, or OpenFailed (then another Open)
    Fetch            ->             Chunks..., TransferDone; or TransferFailed
    Cancel, Credit, Renew ->        Renewed answers Renew

A decode instance orders and owns its pages; a prefill instance never learns their ids. A chunk is one page: a block in
a layer, which lies in a slot of the receiver's window (in shared memory, a GPU's memory, memory that rdma writes to, or
as a frame after the message); the sender may use a slot again when a Credit returned it, so a window bounds what
is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy_sd.types import KvDescription, Request
from fastdeploy_sd.wire.protocol import Protocol

MAX_ID_CHARS = 64
_MAX_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class PeerHello:
    """A decode instance introduces itself. protocols: those it can receive by, the best first."""

    instance_id: str
    description: KvDescription
    protocols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a PeerHello that fits; `ipc_name` is the abstract Unix socket that takes shared memory, or ""."""

    instance_id: str
    description: KvDescription
    protocols: tuple[str, ...]
    ipc_name: str


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The answer to a PeerHello that does not fit, and to anything before a PeerHello."""

    reason: str


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where the chunks for one rank go.

    Attributes:
        num_slots, slot_bytes: its window.
        token: under which its shared memory was handed over, "" where there is none.
        session, base: its rdma engine "host:port" and the window's address there; "" and 0 without rdma.
    """

    num_slots: int
    slot_bytes: int
    token: str = ""
    session: str = ""
    base: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.num_slots <= _MAX_SLOTS and self.slot_bytes > 0):
            raise ValueError(f"window: expected 1..{_MAX_SLOTS} slots, got {self.num_slots} of {self.slot_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Open:
    """Offers windows to send to by `protocol`, one per rank of the decode instance."""

    protocol: str
    receivers: tuple[Receiver, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """The windows can be written to."""


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """They cannot."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Orders the KV of a prompt.

    Attributes:
        transfer_id: 128 random bits; names this attempt only, so that what is late cannot belong to another.
        first_block, num_blocks: the blocks of the prompt whose pages are wanted.
        timeout_s: after this time without progress the receiver gives up.
    """

    transfer_id: str
    request: Request
    first_block: int
    num_blocks: int
    timeout_s: float

    def __post_init__(self) -> None:
        if not 0 < len(self.transfer_id) <= MAX_ID_CHARS or self.first_block < 0 or self.num_blocks < 1:
            raise ValueError("expected an id and some blocks")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: expected a positive number, got {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class Cancel:
    """This transfer is not waited for any more."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Credit:
    """Slots of a receiver's window that have been read."""

    receiver: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """A sign of life; transfers that are not named for a whole lease have no one who waits for them."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to Renew: steps computed since the start, which are progress, and which of its transfers go on."""

    num_steps: int = 0
    transfer_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunks:
    """Pages of one layer: places in the prompt, slots of a receiver's window, XXH64 checksums (0 in GPUs' memory)."""

    transfer_id: str
    receiver: int
    layer: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.blocks) == len(self.slots) == len(self.checksums):
            raise ValueError("expected as many blocks as slots and checksums")


@dataclass(frozen=True, slots=True)
class TransferDone:
    """All pages were sent. drafts: the first output token and what was drafted after it; may be empty."""

    transfer_id: str
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The prefill instance gives this transfer up."""

    transfer_id: str
    reason: str


FromDecode = PeerHello | Open | Fetch | Cancel | Credit | Renew
FromPrefill = Welcome | PeerRefused | Opened | OpenFailed | Renewed | Chunks | TransferDone | TransferFailed
_PROTOCOL = Protocol(9, FromDecode, FromPrefill)
encode = _PROTOCOL.encode
decode_from_decode: Callable[[bytes], FromDecode] = _PROTOCOL.decoder(FromDecode)
decode_from_prefill: Callable[[bytes], FromPrefill] = _PROTOCOL.decoder(FromPrefill)
