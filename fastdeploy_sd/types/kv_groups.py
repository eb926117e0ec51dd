"""KV groups: layers whose KV lives equally long have blocks of their own, all taken from one pool of equal size.

Layers of full attention keep every block of a request. Layers with a sliding window need the last tokens only:

    tokens    [0 .................................. num_computed) [next step)
    full      [============================================================]
    window W                     [... num_computed - W + 1 ................]      the blocks before are free
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share the block table of each request.

    Attributes:
        window: tokens that a token attends to, itself included; None = all tokens before it.
        max_step_tokens: most tokens that a step adds to a request; read only where there is a window.
    """

    block_size: int
    window: int | None = None
    max_step_tokens: int = 1

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold tokens 0 .. num_tokens - 1."""
        return -(-num_tokens // self.block_size)

    def first_block(self, num_computed_tokens: int) -> int:
        """The first block that a later token attends to, when so many tokens are computed."""
        return 0 if self.window is None else max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def first_carried_block(self, num_tokens: int) -> int:
        """The first block that must come from elsewhere where so many tokens are not computed here, or all but one."""
        return self.first_block(max(num_tokens - 1, 0) // self.block_size * self.block_size)

    def admitted_tokens(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Tokens that a request needs blocks for when it is admitted: all, or those of its next step."""
        return num_tokens if self.window is None else min(num_tokens, num_computed_tokens + self.max_step_tokens)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request has at once while its tokens grow to so many."""
        whole = self.num_blocks(num_tokens)
        if self.window is None:
            return whole
        return min(whole, self.num_blocks(self.window - 1 + self.max_step_tokens) + 1)


def most_blocks(groups: Sequence[KvGroup], num_tokens: int) -> int:
    """Most blocks of all groups that a request of so many tokens has at once."""
    return sum(group.most_blocks(num_tokens) for group in groups)


def most_tokens(groups: Sequence[KvGroup], num_blocks: int) -> int:
    """Tokens of the longest request whose KV fits into so many blocks."""
    return bisect_right(range(_MAX_TOKENS), num_blocks, key=lambda count: most_blocks(groups, count)) - 1
