"""Who is told what becomes of cached blocks. Owns the interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock


class CacheListener(Protocol):
    """Whoever keeps copies of cached blocks; told before anything else happens to them."""

    def published(self, block_id: int, content: CachedBlock) -> None:
        """A block can be found from now on; its content stays until `lost`."""
        ...

    def lost(self, block_ids: Sequence[int]) -> None:
        """Blocks were given away: their content may be overwritten when this returns."""
        ...

    def discarded(self, block_hashes: Sequence[bytes]) -> None:
        """Contents are suspect: nobody may find a copy either."""
        ...
