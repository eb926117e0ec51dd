"""KV of a request's leading tokens that comes from elsewhere: another instance, or a slower memory. Owns the interface.

A request that has its blocks is offered to the connector. While this brings something into them the request is admitted
and not ready; then it arrives, with as many tokens as are computed now, or is cancelled:

    admit -> begin -> False                                  computed here, at once
                   -> True ... arrival (some, or no tokens)  the rest is computed here
                           ... cancel                        preempted or ended meanwhile

What goes wrong on the way is an arrival with the tokens that were there before. Knows no transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastdeploy_sd.types import I32, Request, RequestId

# Origin of KV from this instance's own second level: the request had its prefix cached.
SWAP = "swap"


@dataclass(frozen=True, slots=True)
class KvArrival:
    """All the KV that a request will get is in its blocks.

    Attributes:
        num_tokens: leading tokens whose KV is there now, those that `begin` was told of among them; fewer than the
            request has, as its last one is always computed here.
        drafts: guesses at what follows its tokens, in the vocabulary; only where `num_tokens` is all but the last one.
        is_draft_ahead: whether draft layers, which have all these tokens as well, have the KV of one more. For a
            request whose method keeps draft KV it must be so unless `num_tokens` ends a block. With several draft
            layers it cannot: each reads rows of the one before it, which only pages of whole blocks hold.
        origins: where the new tokens came from -> how many, for statistics.
        is_lost: what was asked for has not all come, and without it the tokens after it cannot be computed in the
            request's blocks: it gives them up and begins anew.
        failure: why less came than was asked for, as a short name that is counted; "" = nothing went wrong.
    """

    request_id: RequestId
    num_tokens: int
    drafts: tuple[int, ...] = ()
    is_draft_ahead: bool = False
    origins: Mapping[str, int] = field(default_factory=dict)
    is_lost: bool = False
    failure: str = ""


class KVConnector(Protocol):
    """Brings KV of requests' leading tokens into their blocks. Called by the thread that steps the engine; `fd`:
    readable as long as `arrivals` has something to return or to do, even if no request waits; None = never.
    """

    fd: int | None

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        """Start to bring what can be brought.

        Called each time a request has got blocks, so again after it was preempted.

        Args:
            token_ids: i32[n], the request's committed tokens; the output so far, if any, is among them.
            num_cached_tokens: leading tokens whose KV is in the first blocks already, whole blocks; these are shared.
            block_ids: of all its tokens. Those after the cached ones are the connector's to write until the arrival is
                taken or `cancel` returns.

        Returns:
            Whether the request waits. Then it arrives, or is cancelled; the connector bounds the time without progress.
        """

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request that waits. When this returns its blocks are not written to, and it will not arrive."""

    def arrivals(self) -> Sequence[KvArrival]:
        """Return, once each, the requests that need not wait any longer."""


class NoKVConnector:
    """Every request is computed here."""

    fd: int | None = None

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        return False

    def cancel(self, request_id: RequestId) -> None:
        """No request waits."""

    def arrivals(self) -> Sequence[KvArrival]:
        return ()
