"""How many bytes a method holds, for those that tell. A method need not: its memory is no part of the interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from fastdeploy_sd.spec_decode.proposer import Proposer


@runtime_checkable
class _Sized(Protocol):
    def num_bytes(self) -> int: ...


@runtime_checkable
class _Cache(Protocol):
    def stats(self) -> Any: ...


def memory_of(proposer: Proposer) -> Callable[[], int] | None:
    """Return what asks a method for its bytes: all of its indexes, or its cache of other requests' outputs.

    None where the method does not tell.
    """
    if isinstance(proposer, _Sized):
        return proposer.num_bytes
    if isinstance(proposer, _Cache):
        cache = proposer
        return lambda: int(cache.stats().num_bytes)
    return None
