"""What the second level of the prefix cache counts. Plain numbers that cross a process border."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SwapStats:
    """Counters since the engine started, and gauges of now. Without a second level all are 0.

    Attributes:
        num_slots: blocks that fit in. num_used_slots: of these, with content or about to get some.
        block_bytes: bytes of a block over all layers.
        num_restored: slots whose content came from an earlier process.
        num_lookups: times a request had blocks that the first level lacked. num_hits: times the first of these was
            found in a slot.
        num_queried_blocks: blocks that the first level lacked, of requests that got blocks.
        num_loaded, num_stored: blocks copied from and to slots. load_seconds, store_seconds: time in these copies.
        num_begun_stores, num_begun_loads: copies that were ordered; each is one of those below in the end.
        num_lost: blocks that were given away before they were copied.
        num_withdrawn: blocks that were no longer wanted before they were loaded.
        num_damaged: slots that did not hold what had been written.
        num_failed: copies that the system refused.
        num_evicted: slots overwritten with another content.
        num_late: requests that stopped waiting for blocks.
    """

    num_slots: int = 0
    num_used_slots: int = 0
    block_bytes: int = 0
    num_restored: int = 0
    num_lookups: int = 0
    num_hits: int = 0
    num_queried_blocks: int = 0
    num_loaded: int = 0
    num_begun_stores: int = 0
    num_begun_loads: int = 0
    num_stored: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    num_evicted: int = 0
    num_lost: int = 0
    num_withdrawn: int = 0
    num_damaged: int = 0
    num_failed: int = 0
    num_late: int = 0
