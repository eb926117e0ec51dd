"""ClusterView: which instances there are and how much they have to do, as a process of a server sees them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from fastdeploy_sd.cluster.placement import Candidate
from fastdeploy_sd.cluster.redis.frames import CLUSTER, Record
from fastdeploy_sd.cluster.redis.store import Store, StoreDown, end_tasks
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.protocol import SignedCodec

logger = logging.getLogger(__name__)

# No request waits for a Redis that is known to be slow or down; it is tried again after so long.
_TIMEOUT_S = 0.5
_RETRY_S = 1.0
# A request that was placed reaches its engine within this time.
_ON_ITS_WAY_S = 0.1


class ClusterView:
    """The records in Redis, read again when a request is to be placed and they are older than a period.

    Instances with another `fingerprint` cannot take this server's requests, and a record older than `expire_s` is void.
    """

    def __init__(self, store: Store, codec: SignedCodec, fingerprint: str, period_s: float, expire_s: float) -> None:
        self._store, self._codec, self._fingerprint = store, codec, fingerprint
        self._period_s, self._expire_s = period_s, expire_s
        self._records: dict[str, Record] = {}
        self._offset_s = 0.0  # of Redis's clock against ours
        self._next_read = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._assigned: dict[str, list[float]] = {}
        self._strangers: set[str] = set()
        self._is_down = False

    async def refresh(self) -> None:
        """Read the records unless they are fresh; waits for Redis half a second at most, and raises nothing."""
        if self._reading is None and time.monotonic() >= self._next_read:
            self._reading = asyncio.create_task(self._read())
        if self._reading is not None and not self._is_down:
            await asyncio.wait({self._reading}, timeout=_TIMEOUT_S)
            self._is_down = self._is_down or self._reading is not None

    def records(self) -> list[Record]:
        """The instances that are there, in no order."""
        oldest = self._now() - self._expire_s
        return [record for record in self._records.values() if record.sent_at >= oldest]

    def candidate(self, record: Record) -> Candidate:
        """Return an instance with its load and the requests it was given here that its engine need not know yet."""
        name = record.member.instance_id
        since = [when for when in self._assigned.get(name, []) if when > record.load_at - _ON_ITS_WAY_S]
        self._assigned[name] = since
        return Candidate(record.member, replace(record.load, num_waiting=record.load.num_waiting + len(since)))

    def note_assigned(self, instance: str) -> None:
        self._assigned.setdefault(instance, []).append(self._now())

    def forget(self, instance: str) -> None:
        """An instance cannot be reached: it gets nothing until its record has been read again."""
        self._records.pop(instance, None)

    async def close(self) -> None:
        if self._reading is not None:
            await end_tasks([self._reading])

    def _now(self) -> float:
        return time.monotonic() + self._offset_s

    async def _read(self) -> None:
        try:
            entries, now = await self._store.read_records(CLUSTER)
        except StoreDown as error:
            if not self._is_down:
                logger.error("%s: requests stay at this instance until it answers", error.message)
            self._is_down = True
            self._next_read = time.monotonic() + _RETRY_S
        else:
            if self._is_down:
                logger.warning("Redis answers again")
            self._is_down = False
            self._offset_s = now - time.monotonic()
            self._records = self._readable(entries)
            self._assigned = {name: times for name, times in self._assigned.items() if name in self._records}
            self._next_read = time.monotonic() + self._period_s
        finally:
            self._reading = None

    def _readable(self, entries: dict[str, bytes]) -> dict[str, Record]:
        found: dict[str, Record] = {}
        for name, frame in entries.items():
            try:
                record = self._codec.decode(f"{CLUSTER}.{name}", Record, frame)
            except ProtocolError as error:
                self._complain(name, f"its record cannot be read: {error.message}")
                continue
            if record.member.fingerprint != self._fingerprint or not self._fingerprint:
                self._complain(name, "it serves another model or in another arithmetic")
            elif record.member.instance_id == name:
                found[name] = record
        self._strangers.intersection_update(entries)
        return found

    def _complain(self, name: str, reason: str) -> None:
        if name not in self._strangers:
            self._strangers.add(name)
            logger.warning("instance %s is left out: %s", name[:64], reason)
