"""The blocks of one request, and what a match of its prefix found. Values: only `KVCacheManager` changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdeploy_sd.engine.kvcache.prefix_cache import PrefixCache
from fastdeploy_sd.types import LIVE_STATE, NO_STATE, RequestId
from fastdeploy_sd.types.kv_groups import KvGroup

NO_BLOCK = -1
"""In place of a block that a group does not need: its tokens are outside of the window."""


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """The blocks of one request in one KV group, in token order.

    With block_size 4, after 10 tokens were computed and 9 of them are committed:

        tokens      0  1  2  3 | 4  5  6  7 | 8  d  .  .
        blocks      block_ids[0] block_ids[1] block_ids[2]
        hashes      hashes[0]    hashes[1]                     num_published = 2

    Attributes:
        block_ids: NO_BLOCK for the first num_freed.
        hashes: chain hashes of leading full blocks of committed tokens. Tokens do not change once committed, so they
            outlive the blocks: after preemption nothing is hashed again.
        num_published: leading blocks that have been offered to the prefix cache or came from it.
        num_sent: leading blocks that the executor knows.
    """

    block_ids: list[int] = field(default_factory=list)
    num_freed: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_sent: int = 0

    def verify(self, name: str, prefix_cache: PrefixCache, parent: bytes) -> None:
        """Verify that blocks and hashes agree with the cache; `parent` is the root of the chain."""
        kept = self.block_ids[self.num_freed :]
        assert len(set(kept)) == len(kept), f"{name}: a block twice in its table"
        assert self.block_ids[: self.num_freed] == [NO_BLOCK] * self.num_freed, f"{name}: a block before its window"
        for block_id, block_hash in zip(self.block_ids[: self.num_published], self.hashes, strict=False):
            content = prefix_cache.content(block_id)
            if content is not None:
                assert (content.parent, content.hash) == (parent, block_hash), f"{name}: block {block_id} off the chain"
            parent = block_hash
        for block_id in self.block_ids[self.num_published :]:
            assert block_id not in prefix_cache, f"{name}: block {block_id} was published too early"


@dataclass(slots=True, eq=False)
class RequestStates:
    """What is kept of the recurrent states of one request; see `StateCache`.

    Attributes:
        source: where its next step begins, see StatePlan.initial. begin: tokens before that, of its first step.
        arriving: the snapshot that it goes on from when its KV has come from elsewhere; NO_STATE = there is none.
        num_given: tokens that it had when it was admitted.
        branch: where it left the KV blocks of others, if it went on from a snapshot before that; 0 = it did not.
        pending: how many tokens a snapshot will hold -> the snapshot; they rise.
        latest: hash of what the last one holds that it published after the tokens that it was given; b"" = none.
    """

    source: int = LIVE_STATE
    begin: int = 0
    num_given: int = 0
    branch: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    latest: bytes = b""
    arriving: int = NO_STATE


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request.

    Attributes:
        salt: requests share blocks only with the same salt.
        groups: one per KV group; a table begins with the first one.
        num_slots: tokens that fit into the blocks of every group.
        failed_admission: the last one, None = it did not fail.
        states: of a model with recurrent states.
    """

    request_id: RequestId
    salt: str = ""
    groups: list[GroupBlocks] = field(default_factory=lambda: [GroupBlocks()])
    num_slots: int = 0
    failed_admission: FailedAdmission | None = None
    states: RequestStates = field(default_factory=RequestStates)

    def add_groups(self, count: int) -> None:
        while len(self.groups) < count:
            self.groups.append(GroupBlocks())

    @property
    def is_sent(self) -> bool:
        """Whether the executor knows blocks of the request."""
        return self.groups[0].num_sent > 0

    def count_slots(self, groups: Sequence[KvGroup]) -> int:
        """Return how many tokens fit into the blocks of every group."""
        if len(groups) == 1:  # for speed, here and below
            return len(self.groups[0].block_ids) * groups[0].block_size
        return min(len(own.block_ids) * group.block_size for group, own in zip(groups, self.groups, strict=True))

    def num_missing(self, groups: Sequence[KvGroup], num_tokens: int) -> list[int]:
        """Return how many blocks more of each group hold so many tokens."""
        if len(groups) == 1:
            return [groups[0].num_blocks(num_tokens) - len(self.groups[0].block_ids)]
        pairs = zip(groups, self.groups, strict=True)
        return [max(group.num_blocks(num_tokens) - len(own.block_ids), 0) for group, own in pairs]

    def verify(self, groups: Sequence[KvGroup], prefix_cache: PrefixCache) -> None:
        """Verify that the blocks of every group agree with one another and with the cache."""
        name = f"request {self.request_id}"
        assert self.num_slots == self.count_slots(groups), f"{name}: wrong num_slots"
        for g, own in enumerate(self.groups):
            own.verify(name, prefix_cache, prefix_cache.root(self.salt, g))

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all groups, one group after the other; NO_BLOCK where there is none."""
        if len(self.groups) == 1:
            return self.groups[0].block_ids
        return [block_id for group in self.groups for block_id in group.block_ids]


@dataclass(frozen=True, slots=True)
class FailedAdmission:
    """When there were not enough blocks for a request: the events until then, and the hash that its match lacked."""

    num_releases: int
    num_publications: int
    missing_hash: bytes | None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that hold a request's first `num_tokens` tokens. Valid until blocks are next allocated.

    Attributes:
        block_ids: per group, NO_BLOCK where no later token attends to the block; () = nothing was found.
        missing_hash: of the first block that is not cached. None = more could not be matched, or there are several
            groups.
        snapshot: of the recurrent state after these tokens; NO_STATE = there is none, or nothing was found.
        num_kv_tokens: of a model with recurrent states, tokens whose blocks are cached, with a snapshot or not.
    """

    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    missing_hash: bytes | None = None
    snapshot: int = NO_STATE
    num_kv_tokens: int = 0

    def num_missing(self, groups: Sequence[KvGroup], num_tokens: int) -> list[int]:
        """Return how many blocks more of each group a request of so many tokens is admitted with."""
        found = self.block_ids or ((),) * len(groups)
        return [
            max(group.num_blocks(group.admitted_tokens(self.num_tokens, num_tokens)) - len(own), 0)
            for group, own in zip(groups, found, strict=True)
        ]

    @property
    def shared_block_ids(self) -> list[int]:
        return [block_id for ids in self.block_ids for block_id in ids if block_id != NO_BLOCK]


NO_MATCH = PrefixMatch((), 0)
