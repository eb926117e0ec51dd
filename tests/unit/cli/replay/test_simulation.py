"""Replaying: counts against examples worked out by hand, and the order in which a proposer is called."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.cli.replay.counts import ReplayCounts
from fastdeploy_sd.cli.replay.recording import Conversation
from fastdeploy_sd.cli.replay.simulation import Replay, max_len, vocab_size
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import I32, DraftTokens


def conversation(name: str, *parts: list[int]) -> Conversation:
    """Prompt, response, prompt, response, ..."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    spans = tuple((ends[i - 1], ends[i]) for i in range(1, len(parts), 2))
    return Conversation(name, np.array([i for part in parts for i in part], np.int32), spans)


def replay_ngram(k: int, *conversations: Conversation, concurrency: int = 1, draft_trees: bool = False) -> ReplayCounts:
    config = SpeculativeConfig("ngram", k, min_ngram_size=2, max_ngram_size=5, draft_trees=draft_trees)
    context = ProposerContext(concurrency, max_len(conversations), vocab_size(conversations))
    return Replay(create_method("ngram", config, context), k, concurrency).run(conversations)


def test_drafts_are_judged_by_the_recorded_answer() -> None:
    # After the first token, 3, the end (1 2 3) is found at the beginning and 4 5 1 is drafted; 4 5 is right, 9 comes
    # instead of 1. The end (5 9) is new: nothing is drafted, the last step gives 0.
    counts = replay_ngram(3, conversation("c", [1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 9, 0]))
    assert (counts.num_responses, counts.num_output_tokens) == (1, 5)
    assert (counts.num_verify_steps, counts.num_drafting_steps) == (2, 1)
    assert counts.tokens_per_verify_step == 4 / 2
    assert counts.drafted.tolist() == counts.reached.tolist() == [1, 1, 1]
    assert counts.accepted.tolist() == [1, 1, 0]
    assert (counts.num_drafted, counts.num_accepted) == (3, 2)
    assert counts.acceptance_per_position == [1.0, 1.0, 0.0]


def test_drafts_past_the_end_are_not_output() -> None:
    # 4 5 1 is drafted and the answer ends with 4: the step gives one token, not two.
    counts = replay_ngram(3, conversation("c", [1, 2, 3, 4, 5, 1, 2], [3, 4]))
    assert (counts.num_output_tokens, counts.num_verify_steps) == (2, 1)
    assert counts.drafted.tolist() == [1, 1, 1]
    assert counts.reached.tolist() == [1, 1, 0]
    assert counts.accepted.tolist() == [1, 0, 0]


def test_an_earlier_answer_is_part_of_the_next_prompt() -> None:
    # The second answer repeats the first one: 8 9 is found there.
    counts = replay_ngram(2, conversation("c", [1], [7, 8, 9, 6], [1], [8, 9, 6]))
    assert (counts.num_responses, counts.num_output_tokens) == (2, 7)
    # First answer: 3 steps without drafts. Second: after 8, (1 8) is new; then (8 9) drafts 6 and what followed it.
    assert counts.num_verify_steps == 3 + 2
    assert counts.accepted.tolist() == [1, 0]


def test_a_tree_is_judged_along_the_path_of_the_answer() -> None:
    # (1 2) was followed by 7 first and by 8 later. After 2, the tree is 8 9 and the branch 7 6, which is right.
    text = conversation("c", [1, 2, 7, 6, 0, 1, 2, 8, 9, 5, 1], [2, 7, 6, 4])
    counts = replay_ngram(4, text, draft_trees=True)
    assert (counts.num_output_tokens, counts.num_verify_steps) == (4, 1)
    assert (counts.drafted.tolist(), counts.reached.tolist()) == ([2, 2, 0, 0], [2, 1, 0, 0])
    assert counts.accepted.tolist() == [1, 1, 0, 0]
    assert replay_ngram(4, text).num_verify_steps == 2  # the chain is 8 9 5 1


def test_plain_decoding_is_one_token_per_step() -> None:
    counts = replay_ngram(2, conversation("c", [1, 2], [3, 4, 5, 6]))
    assert counts.tokens_per_verify_step == 1.0
    assert counts.num_drafted == 0
    assert replay_ngram(2, conversation("c", [1, 2], [3])).tokens_per_verify_step == 1.0


class Witness:
    """Never drafts; checks what it is shown and writes down when."""

    num_lookahead_slots = 0

    def __init__(self, *conversations: Conversation) -> None:
        self.texts = {c.id: c.token_ids.tolist() for c in conversations}
        self.open: dict[int, str] = {}
        self.num_at_once: list[int] = []
        self.begun: list[str] = []

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            assert request.table_row not in self.open
            assert request.num_tokens == request.num_prompt_tokens
            self.open[request.table_row] = request.request_id
            self.begun.append(request.request_id)

    def propose(self, x: ProposeInput) -> DraftTokens:
        assert [self.open[table_row] for table_row in x.table_rows.tolist()] == list(x.request_ids)
        for r, request_id in enumerate(x.request_ids):
            text = self.texts[request_id.partition("/")[0]]
            assert x.token_table[x.table_rows[r], : x.num_tokens[r]].tolist() == text[: x.num_tokens[r]]
        assert (x.max_draft_len == 4).all()
        self.num_at_once.append(len(x.request_ids))
        return DraftTokens.none(len(x.request_ids))

    def forget(self, table_rows: I32) -> None:
        for table_row in table_rows.tolist():
            del self.open[table_row]

    def close(self) -> None:
        """Nothing to save."""


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_conversations_run_side_by_side_and_their_answers_in_order(concurrency: int) -> None:
    conversations = [
        conversation("a", [1, 2], [3, 4], [5], [6, 7]),
        conversation("b", [1], [2, 3, 4, 5, 6]),
        conversation("c", [9, 9], [8]),
    ]
    witness = Witness(*conversations)
    counts = Replay(witness, 4, concurrency).run(conversations)
    assert sorted(witness.begun) == ["a/2", "a/5", "b/1", "c/2"]
    assert witness.begun.index("a/2") < witness.begun.index("a/5")
    assert max(witness.num_at_once) == concurrency
    assert (counts.num_responses, counts.num_output_tokens, counts.num_verify_steps) == (4, 10, 6)
    # Every step of every answer was seen, the last ones too: a method that learns needs the whole text.
    assert counts.num_rows == sum(witness.num_at_once) == 10
    if concurrency == 1:
        assert witness.begun == ["a/2", "a/5", "b/1", "c/2"]


def test_memory_is_the_largest_seen() -> None:
    sizes = iter([5, 9, 7])
    c = conversation("c", [1], [2, 3, 4])
    counts = Replay(Witness(c), 4, memory_bytes=lambda: next(sizes)).run([c])
    assert counts.peak_memory_bytes == 9
