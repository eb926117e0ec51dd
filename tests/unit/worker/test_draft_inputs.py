"""What drafting methods are shown after a step: committed tokens, and how many drafts may follow them."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.types import NewRequest
from tests.unit.worker.steps import Steps, new


def two_requests() -> list[NewRequest]:
    """With 4 and 3 tokens, and blocks for 16."""
    return [replace(new(name, n), block_ids=(0, 1, 2, 3)) for name, n in (("a", 4), ("b", 3))]


def test_drafts_leave_room_for_the_token_behind_them() -> None:
    """max_total is 9 more than the prompt; a failed row gets none whatever was planned."""
    steps = Steps(*two_requests())
    x = steps.run(("a", "b"), [[5], []], [4, 4])
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([5, 3], [4, 0])
    x = steps.run(("a", "b"), [[5] * 4, [6]], [4, 2])
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([9, 4], [3, 2])
    x = steps.run(("a", "b"), [[5] * 4, [6]], [4, 0])
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([13, 5], [0, 0])


def test_an_input_holds_until_the_next_step_and_a_kept_one_longer() -> None:
    steps = Steps(*two_requests())
    x = steps.run(("a", "b"), [[5], [6]], [1, 1])
    kept = x.kept()
    y = steps.run(("b",), [[6]], [3])
    assert (y.request_ids, y.num_tokens.tolist(), y.max_draft_len.tolist()) == (("b",), [5], [3])
    assert (kept.num_tokens.tolist(), kept.max_draft_len.tolist(), kept.target) == ([5, 4], [1, 1], None)
    assert x.num_tokens.tolist() == [5, 4], "of b in row 0 now"
    assert y.table_rows.tolist() == steps.table.table_rows(["b"]).tolist()


def test_the_same_requests_have_the_same_input_and_others_another() -> None:
    steps, names = Steps(*two_requests()), tuple("ab")
    x = steps.run(names, [[5], [6]], [1, 1])
    assert steps.run(names, [[5], [6]], [1, 2]) is x
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([6, 5], [1, 2])
    assert steps.run(tuple("ba"), [[6], [5]], [1, 1]) is not x


def test_a_method_that_runs_a_model_sees_what_was_run() -> None:
    steps = Steps(*two_requests(), has_target=True)
    for num_valid in (4, 5):
        target = steps.run(("a", "b"), [[5], []], [1, 1]).target
        assert target is not None
        assert (target.num_valid.tolist(), target.num_kv_slots.tolist()) == ([num_valid, 2], [16, 16])
        assert target.query_start_loc.tolist() == [0, 1, 2]
