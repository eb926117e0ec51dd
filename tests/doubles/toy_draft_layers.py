"""The KV of a draft model's layers, without the model: what is written where, and whether what is read is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastdeploy_sd.types import RequestId, SpeculationInfo

_GARBAGE = (-1, 0)


def slot_of(block_ids: list[int], position: int, block_size: int) -> int:
    """The slot of the KV cache that holds a position."""
    return block_ids[position // block_size] * block_size + position % block_size


class ToyDraftLayers:
    """Does to its cache what a draft model does, for requests whose method keeps KV, and checks all it would read.

    Draft layers share the target's block table. Slot q holds what comes from token q, so slot 0 stays unused, and with
    N committed tokens all slots below N - 1 are filled, those of drafts that were rejected over again:

        slots   0  [1 ........... next_slot) [next_slot ...... N)  [N ........ N + d - 1)
                   filled by earlier steps    filled now            overwritten by d drafting steps, holds garbage

    A slot without a block ends both the filling and the drafting.
    """

    def __init__(self, speculation: SpeculationInfo, block_size: int) -> None:
        self._speculation, self._block_size = speculation, block_size
        self._kv: dict[int, tuple[int, int]] = {}
        self._next_slot: dict[RequestId, int] = {}
        self.num_cut_drafts = 0

    def begin(self, request_id: RequestId, num_filled_slots: int) -> None:
        """Start on a request that is drafted for with the model."""
        self._next_slot[request_id] = num_filled_slots

    def put(self, block_ids: list[int], position: int, prefix: int) -> None:
        """Write what the model would have at a position."""
        self._kv[slot_of(block_ids, position, self._block_size)] = (position, prefix)

    def read_slots(self, slots: Iterable[int]) -> tuple[tuple[int, int] | None, ...]:
        """What some slots hold."""
        return tuple(self._kv.get(slot) for slot in slots)

    def write_slots(self, contents: Mapping[int, tuple[int, int]]) -> None:
        """Overwrite slots."""
        self._kv.update(contents)

    def forget(self, request_id: RequestId) -> None:
        """Stop; the others are ignored."""
        self._next_slot.pop(request_id, None)

    def run(
        self,
        request_id: RequestId,
        block_ids: list[int],
        prefixes: list[int],
        num_valid: int,
        max_draft_len: int,
    ) -> int:
        """Fill the slots of committed tokens, check them all, then draft.

        Args:
            prefixes: hash of the tokens up to and with each committed one.
            num_valid: committed tokens that the target has run.

        Returns:
            How many drafts the slots allow.

        Raises:
            AssertionError: a slot that the model would read holds something else.
        """
        if request_id not in self._next_slot:
            return max_draft_len
        num_tokens, num_slots = len(prefixes), len(block_ids) * self._block_size
        end = min(num_valid + 1, num_tokens, num_slots)
        for position in range(max(self._next_slot[request_id], 1), end):
            self._kv[slot_of(block_ids, position, self._block_size)] = (position, prefixes[position])
        for position in range(1, end):
            found, expected = (
                self._kv.get(slot_of(block_ids, position, self._block_size)),
                (position, prefixes[position]),
            )
            assert found == expected, f"{request_id}: draft KV at {position} is {found}, expected {expected}"
        self._next_slot[request_id] = end
        room = num_slots - num_tokens + 1 if end == num_tokens else 0
        num_drafts = min(max_draft_len, self._speculation.num_lookahead_slots, room)
        for position in range(num_tokens, num_tokens - 1 + num_drafts):
            self._kv[slot_of(block_ids, position, self._block_size)] = _GARBAGE
        self.num_cut_drafts += min(max_draft_len, self._speculation.num_lookahead_slots) - num_drafts
        # Another method may extend what the model drafted.
        return max_draft_len if num_drafts == self._speculation.num_lookahead_slots else num_drafts
