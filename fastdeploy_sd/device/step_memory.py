"""The memory of a step: every array that preparing, verifying, committing and drafting write, once, at its bound.

How large a step can be is known when the server starts, so nothing is allocated while one runs. Addresses never change:
native calls and recorded passes are bound to the whole arrays, and a step writes counts and contents. This is memory,
not a value: what is in it holds until the next step. What a step hands on are views, see `types.StepView`. What a model
on another device reads of a step lies in one piece, and what it writes in another one, so that each is one copy. Knows
no request and no op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.rules.requests import MAX_EOS_TOKEN_IDS
from fastdeploy_sd.rules.sampling import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKEN_IDS

_ALIGNMENT = 64
_MAX_FORBIDDEN = MAX_BAD_WORD_TOKENS + MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large a step can be: R requests, T tokens, k drafts of one; of all together fewer where not all fit."""

    num_requests: int
    num_tokens: int
    num_request_drafts: int = 0

    @property
    def num_logits(self) -> int:
        """L: a request has a row for each of its drafts and one more, and every row is a token of the step."""
        return min(self.num_requests * (self.num_request_drafts + 1), self.num_tokens)

    @property
    def num_drafts(self) -> int:
        """D: every draft is a token of the step."""
        return min(self.num_requests * self.num_request_drafts, self.num_tokens)


_MAX_PROMPT_LOGITS_BYTES = 32 << 20
_MIN_PROMPT_ROWS = 8  # also with the largest vocabulary: every piece reads all of the LM head


def max_prompt_rows(num_tokens: int, vocab_size: int) -> int:
    """Return the rows of prompts whose logits are computed at once, of a step of at most so many tokens."""
    return min(num_tokens, max(_MIN_PROMPT_ROWS, _MAX_PROMPT_LOGITS_BYTES // (4 * vocab_size)))


class StepMemory:
    """See the module. A page of it is taken from the system when a step first writes to it.

    Attributes:
        inputs, outputs: u8[n], the pieces that the columns lie in which a model's calls read and write in every step.
        table_rows: i32[R], the requests' rows of the request table.
        num_computed, num_new, planned_drafts, draft_token_ids, cu_num_draft: i32[R], i32[R], i32[R], i32[D], i32[R+1],
            of the plan; see `types.SchedulerOutput`. draft_parents: i32[D], of steps with trees.
        input_ids .. parent_rows: the maps; see `ops.reference.batch.BatchMaps`.
        cu_mask, mask_token_ids: i32[L+1], i32[K], tokens forbidden per row of logits.
        allowed_rows, allowed_bits: i32[L], i32[L, ceil(V/32)], tokens that a grammar allows per row of logits; see
            `types.SamplingArrays`. -1 in every row of a step without grammars; num_allowed: the first rows, written
            since then.
        output_token_ids, cu_num_output, num_accepted: i32[L], i32[R+1], i32[R]; see `types.VerifyResult`.
        output_rows: i32[L], the row of logits of each output token.
        num_failed: i32[1], requests without a valid distribution.
        num_committed, max_draft_len: i32[R]; see `spec_decode.proposer.ProposeInput`.
        num_valid, num_kv_slots: i32[R]; see `spec_decode.proposer.TargetStep`. Of steps that a method looks at.
        state_source .. snapshot_slots: of models with recurrent states only; see `ops.delta_memory.DeltaStates`.
        adapter_slots: i32[T], the place of each token's LoRA adapter, -1 = none. Of models that run with adapters only.
        made_drafts: i32[R, k], by table row: drafts of the step before that the host does not know; see
            `types.MADE_ON_DEVICE`. Written on the device alone.
    """

    def __init__(
        self, limits: StepLimits, vocab_size: int, num_snapshots: int | None = None, *, has_adapters: bool = False
    ) -> None:
        """Make the memory; `num_snapshots`: most that a step of a model with recurrent states takes, None = no states.

        A step takes one into each place of the pool at most.
        """
        self.limits, self.has_states, self.has_adapters = limits, num_snapshots is not None, has_adapters
        self.num_requests = self.num_tokens = self.num_logits = self.num_allowed = 0
        requests, tokens, logits = limits.num_requests, limits.num_tokens, limits.num_logits

        def column(length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
            return np.zeros(length, np.int32)

        self.inputs, read = _piece(
            {
                "table_rows": requests, "draft_token_ids": limits.num_drafts, "cu_num_draft": requests + 1,
                "num_computed": requests, "num_new": requests,
                "planned_drafts": requests, "query_start_loc": requests + 1, "seq_lens": requests,
                "logits_indices": logits, "cu_num_logits": requests + 1, "batch_id_per_output": logits,
                "output_positions": logits, "parent_rows": logits, "cu_mask": logits + 1, "input_ids": tokens,
                "positions": tokens, "slot_mapping": tokens, "tree_mask": tokens,
                **_state_columns(requests, num_snapshots),
                **({"adapter_slots": tokens} if has_adapters else {}),
            },
            wide=("slot_mapping", "tree_mask"),
        )  # fmt: skip
        self.outputs, written = _piece(
            {
                "output_token_ids": logits, "output_rows": logits, "cu_num_output": requests + 1,
                "num_accepted": requests, "num_failed": 1,
            }
        )  # fmt: skip
        self.table_rows, self.planned_drafts = read["table_rows"], read["planned_drafts"]
        self.num_computed, self.num_new = read["num_computed"], read["num_new"]
        self.draft_token_ids, self.cu_num_draft = read["draft_token_ids"], read["cu_num_draft"]
        self.input_ids, self.positions = read["input_ids"], read["positions"]
        self.draft_parents = column(limits.num_drafts)
        if num_snapshots is not None:
            self.state_source, self.cu_snapshots = read["state_source"], read["cu_snapshots"]
            self.num_replayed, self.num_certain = read["num_replayed"], read["num_certain"]
            self.snapshot_ends, self.snapshot_slots = read["snapshot_ends"], read["snapshot_slots"]
        if has_adapters:
            self.adapter_slots = read["adapter_slots"]
        self.slot_mapping, self.tree_mask = read["slot_mapping"], read["tree_mask"]
        self.parent_rows = read["parent_rows"]
        self.query_start_loc, self.seq_lens = read["query_start_loc"], read["seq_lens"]
        self.logits_indices, self.cu_num_logits = read["logits_indices"], read["cu_num_logits"]
        self.batch_id_per_output, self.output_positions = read["batch_id_per_output"], read["output_positions"]
        self.cu_mask = read["cu_mask"]
        self.mask_token_ids = column(logits * min(vocab_size, _MAX_FORBIDDEN))
        self.allowed_rows = np.full(logits, -1, np.int32)
        self.allowed_bits = np.zeros((logits, -(-vocab_size // 32)), np.int32)
        self.output_token_ids, self.cu_num_output = written["output_token_ids"], written["cu_num_output"]
        self.output_rows = written["output_rows"]
        self.num_accepted, self.num_failed = written["num_accepted"], written["num_failed"]
        self.num_committed, self.max_draft_len = column(requests), column(requests)
        self.num_valid, self.num_kv_slots = column(requests), column(requests)
        self.made_drafts = np.zeros((requests, max(limits.num_request_drafts, 1)), np.int32)


def _state_columns(num_requests: int, num_snapshots: int | None) -> Mapping[str, int]:
    """Return the lengths of the columns of recurrent states."""
    if num_snapshots is None:
        return {}
    of_requests = dict.fromkeys(("state_source", "num_replayed", "num_certain"), num_requests)
    return {
        **of_requests,
        "cu_snapshots": num_requests + 1,
        **dict.fromkeys(("snapshot_ends", "snapshot_slots"), max(num_snapshots, 1)),
    }


def _piece(
    lengths: Mapping[str, int], wide: tuple[str, ...] = ()
) -> tuple[npt.NDArray[np.uint8], dict[str, npt.NDArray[Any]]]:
    """Return zeros, and columns of them: i32[length] each, i64 of those that are named as wide."""
    dtypes = {name: np.dtype(np.int64 if name in wide else np.int32) for name in lengths}
    sizes = {name: length * dtypes[name].itemsize for name, length in lengths.items()}
    ends = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]).tolist()
    piece = np.zeros(ends[-1], np.uint8)
    begins = dict(zip(lengths, [0, *ends], strict=False))
    return piece, {name: piece[begins[name] :][:size].view(dtypes[name]) for name, size in sizes.items()}
