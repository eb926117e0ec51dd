"""What decode and prefill instances say to each other, as versioned msgpack frames. Knows no socket.

A frame is a version byte, a tag byte and the fields. Decoding raises nothing but ProtocolError, whatever the bytes are.

    decode                          prefill
    Hello            ->             Welcome, or Refused
    Open             ->             Opened, or OpenFailed (then another Open)
    Fetch            ->             Chunks..., Done; or Failed
    Cancel, Credit, Renew ->        Alive answers Renew

A decode instance orders and owns its pages; a prefill instance never learns their ids. A chunk is one page: a block in
a layer, which lies in a slot of the receiver's window (in shared memory, a GPU's memory, memory that rdma writes to, or
as a frame behind the message); the sender may use a slot again when a Credit returned it, so a window bounds what
is on its way.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

from fastdeploy_sd.errors import shown
from fastdeploy_sd.types import KvDescription, Request
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.packing import pack, unpack

PROTOCOL_VERSION = 4
MAX_ID_CHARS = 64
_MAX_SLOTS = 4096
_HEAD_BYTES = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """A decode instance introduces itself. protocols: those it can receive by, the best first."""

    instance_id: str
    description: KvDescription
    protocols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a Hello that fits.

    Attributes:
        protocols: those the prefill instance can send by.
        ipc_name: the abstract Unix socket that takes shared memory, "" without ipc.
    """

    instance_id: str
    description: KvDescription
    protocols: tuple[str, ...]
    ipc_name: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a Hello that does not fit, and to anything from somebody who has not said Hello."""

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
        timeout_s: after this time without progress nobody waits any more.
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
    """Nobody waits for this transfer any more."""

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
class Alive:
    """The answer to Renew.

    Attributes:
        num_steps: that the prefill instance has computed since its start; while it grows there is progress.
        transfer_ids: those of Renew that it works on, or that wait for their turn.
    """

    num_steps: int = 0
    transfer_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunks:
    """Pages of one layer.

    Attributes:
        receiver: the rank's place in Open.
        blocks: places in the prompt, block 0 holds its first tokens.
        slots: where the bytes of each page lie.
        checksums: XXH64 of each page; 0 of one that is in GPUs' memory only.
    """

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
class Done:
    """All pages were sent. drafts: the first output token and what was drafted behind it; may be empty."""

    transfer_id: str
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The prefill instance gives this transfer up."""

    transfer_id: str
    reason: str


FromDecode = Hello | Open | Fetch | Cancel | Credit | Renew
FromPrefill = Welcome | Refused | Opened | OpenFailed | Alive | Chunks | Done | Failed
_OF_DECODE: tuple[type, ...] = typing.get_args(FromDecode)
_OF_PREFILL: tuple[type, ...] = typing.get_args(FromPrefill)
_TYPES: tuple[type, ...] = (*_OF_DECODE, *_OF_PREFILL)
_TAGS = {cls: tag for tag, cls in enumerate(_TYPES)}


def encode(message: FromDecode | FromPrefill) -> bytes:
    """Message -> frame.

    Raises:
        ProtocolError: a value has no wire form.
    """
    return bytes((PROTOCOL_VERSION, _TAGS[type(message)])) + pack(message)


def decode_from_decode(frame: bytes) -> FromDecode:
    """Return what a decode instance sent.

    Raises:
        ProtocolError: another version, unknown tag or malformed value; the only exception there is.
    """
    return typing.cast(FromDecode, _decode(frame, _OF_DECODE))


def decode_from_prefill(frame: bytes) -> FromPrefill:
    """Return what a prefill instance sent.

    Raises:
        ProtocolError: as decode_from_decode.
    """
    return typing.cast(FromPrefill, _decode(frame, _OF_PREFILL))


def _decode(frame: bytes, allowed: tuple[type, ...]) -> object:
    if len(frame) < _HEAD_BYTES or frame[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"frame: expected version {PROTOCOL_VERSION}, got {frame[:1].hex() or 'an empty frame'}")
    cls = _TYPES[frame[1]] if frame[1] < len(_TYPES) else None
    if cls not in allowed or cls is None:
        raise ProtocolError(f"frame: expected a known message, got tag {shown(frame[1])}")
    return unpack(cls, frame[_HEAD_BYTES:])
