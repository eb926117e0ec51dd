"""The proposer: what it drafts from, whom it shares with, and what it may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.device.library import num_threads, set_num_threads
from fastdeploy_sd.spec_decode.dispatcher import create_method
from fastdeploy_sd.spec_decode.methods.suffix import SuffixProposer
from fastdeploy_sd.spec_decode.methods.suffix_drafter import SuffixDrafter, SuffixLimits, SuffixRule, SuffixSequences
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import DraftTokens

NUM_SLOTS = 4
MAX_LEN = 400
VOCAB = 1000
PHRASE = list(range(10, 30))


class Server:
    """A proposer and a token table, driven one request at a time."""

    def __init__(self, **options: Any) -> None:
        config = SpeculativeConfig(method="suffix", **{f"suffix_decoding_{key}": v for key, v in options.items()})
        proposer = create_method("suffix", config, ProposerContext(NUM_SLOTS, MAX_LEN, VOCAB))
        assert isinstance(proposer, SuffixProposer)
        self.proposer = proposer
        self.table = np.zeros((NUM_SLOTS, MAX_LEN), np.int32)
        self.lengths = [0] * NUM_SLOTS

    def begin(
        self,
        table_row: int,
        tokens: Sequence[int],
        *,
        num_prompt_tokens: int | None = None,
        salt: str = "",
        **ends: Any,
    ) -> None:
        self.lengths[table_row] = 0
        self.commit(table_row, tokens)
        prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        self.proposer.begin([DraftRequest(f"r{table_row}", table_row, prompt, len(tokens), cache_salt=salt, **ends)])

    def commit(self, table_row: int, tokens: Sequence[int]) -> None:
        start = self.lengths[table_row]
        self.table[table_row, start : start + len(tokens)] = tokens
        self.lengths[table_row] = start + len(tokens)

    def draft(self, table_row: int, k: int = 5, prefix: Sequence[int] = ()) -> list[int]:
        return self.drafts(table_row, k, prefix).token_ids.tolist()

    def drafts(self, table_row: int, k: int = 5, prefix: Sequence[int] = ()) -> DraftTokens:
        before = DraftTokens(np.array(prefix, np.int32), np.array([0, len(prefix)], np.int32)) if prefix else None
        table_rows, lengths, budget = (np.array([n], np.int32) for n in (table_row, self.lengths[table_row], k))
        return self.proposer.propose(ProposeInput(("r",), table_rows, self.table, lengths, budget, prefix=before))

    def serve(self, table_row: int, prompt: Sequence[int], output: Sequence[int], salt: str = "", **of: Any) -> None:
        """A request from its first step to its end."""
        self.begin(table_row, prompt, salt=salt, **of)
        for token in output:
            self.commit(table_row, [token])
            self.draft(table_row)
        self.proposer.forget(np.array([table_row], np.int32))


def test_a_request_drafts_from_its_own_prompt() -> None:
    server = Server()
    server.begin(0, [*PHRASE, 1, 2, *PHRASE[:3]])
    drafts = server.drafts(0, 3)
    assert drafts.token_ids.tolist() == PHRASE[3:6]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_budget_is_used_in_full_from_one_on(k: int) -> None:
    server = Server()
    server.begin(0, [*PHRASE, 1, *PHRASE[:8]])
    assert server.draft(0, k) == PHRASE[8 : 8 + k]
    assert server.draft(0, 0) == []


def test_unseen_text_is_not_drafted_for() -> None:
    server = Server()
    server.begin(0, [*PHRASE, 500])
    assert server.draft(0) == []


def test_a_repeated_phrase_is_repeated_further() -> None:
    server = Server()
    server.begin(0, [1, 2, 3] * 4)
    assert server.draft(0, 9) == [1, 2, 3] * 3


def test_outputs_are_shared_behind_the_ends_of_their_prompts() -> None:
    server = Server(max_tree_depth=3)
    server.serve(0, [900, 901, 902, 903], PHRASE)
    server.begin(1, [800, *PHRASE[:6]])
    assert server.draft(1) == PHRASE[6:9]
    server.begin(2, [800, 901, 902, 903])
    assert server.draft(2) == PHRASE[:3]
    server.begin(2, [901, 902, 903], salt="another's")
    assert server.draft(2) == []
    server.begin(2, [800, 900])
    assert server.draft(2) == []


def test_a_prompt_without_an_output_is_not_shared() -> None:
    server = Server()
    server.begin(0, [900, 901, 902, 903])
    server.draft(0)
    assert server.proposer.stats().num_bytes == 0


def test_one_prompt_of_two_answers_has_both() -> None:
    """What follows its end more often is drafted first, and the rest once it is told from it."""
    server = Server()
    for answer in (PHRASE, [*PHRASE[:2], 600, 601, 602], PHRASE):
        server.serve(0, [900, 901, 902], answer)
    server.begin(1, [900, 901, 902])
    assert server.draft(1, 3) == PHRASE[:3]
    server.commit(1, [*PHRASE[:2], 600])
    assert server.draft(1, 2) == [601, 602]


def test_running_requests_share_what_they_have_committed() -> None:
    server = Server()
    server.begin(0, [900])
    server.commit(0, PHRASE)
    server.draft(0)
    server.begin(1, PHRASE[:6])
    assert server.draft(1) == PHRASE[6:11]


def test_the_more_frequent_continuation_wins() -> None:
    server = Server()
    for last in (50, 51, 51, 50, 51, 50, 50):
        server.serve(0, [900], [*PHRASE, last])
    server.begin(1, PHRASE)
    assert server.draft(1) == [50]
    server.serve(0, [900], [*PHRASE, 51])
    assert server.draft(1) == [51], "of equals the newest"


def test_another_tenant_never_changes_a_draft() -> None:
    def run(with_tenant: bool) -> list[list[int]]:
        rng = np.random.default_rng(3)
        server, drafts = Server(), []
        server.begin(0, [1, 2, 3], salt="mine")
        if with_tenant:
            server.begin(1, [1, 2, 3], salt="other")
        for _ in range(150):
            tokens = rng.integers(0, 4, 2).tolist()
            server.commit(0, tokens)
            if with_tenant:
                server.commit(1, tokens[::-1])
                server.draft(1)
            drafts.append(server.draft(0))
        return drafts

    alone = run(with_tenant=False)
    assert alone == run(with_tenant=True)
    assert sum(map(len, alone)) > 100


def test_adapters_share_nothing_whatever_the_salt_and_each_shares_with_itself() -> None:
    server, own, other = Server(max_cached_requests=9), "ab" * 16, "cd" * 16
    server.serve(0, [900], PHRASE, adapter_digest=own)
    cases = [("", "", []), ("", other, []), (own, "", []), (own, own, []), ("", own, PHRASE[6:11])]
    for salt, digest, expected in cases:
        server.begin(1, PHRASE[:6], salt=salt, adapter_digest=digest)
        assert server.draft(1) == expected
        server.proposer.forget(np.array([1], np.int32))


def test_salts_share_nothing_and_each_shares_with_itself() -> None:
    server = Server()
    server.serve(0, [900], PHRASE, salt="a")
    for salt, expected in (("", []), ("b", []), ("a", PHRASE[6:11])):
        server.begin(1, PHRASE[:6], salt=salt)
        assert server.draft(1) == expected


def test_a_preempted_request_shares_its_output_once() -> None:
    server = Server()
    server.begin(0, [900, 901])
    server.commit(0, PHRASE[:10])
    server.draft(0)
    server.proposer.forget(np.array([0], np.int32))
    server.begin(2, [900, 901, *PHRASE[:10]], num_prompt_tokens=2)
    server.draft(2)
    assert server.proposer.stats().num_tokens == 12
    server.commit(2, PHRASE[10:12])
    server.draft(2)
    # Only what it follows is there again.
    assert server.proposer.stats().num_tokens == 12 + 12 + 2


EOS = 2
BEHIND = [700, 701, 702]


def test_what_was_accepted_behind_an_end_is_not_shared() -> None:
    """The step that ends a request may commit more; a request that repeats it drafts up to the end."""
    server = Server()
    for _ in range(2):
        server.begin(0, [900, 901, 902], end_token_ids=(EOS,))
        assert BEHIND[0] not in server.draft(0)
        server.commit(0, PHRASE)
        drafts = server.draft(0)
        server.commit(0, [EOS, *BEHIND])
        server.draft(0)
        server.commit(0, BEHIND)
        server.draft(0)
        server.proposer.forget(np.array([0], np.int32))
    assert drafts == [EOS]
    assert server.proposer.stats().num_tokens == 2 * (3 + len(PHRASE) + 1)


@pytest.mark.parametrize(("min_tokens", "num_shared"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, 4)])
def test_an_end_before_the_least_number_of_tokens_is_none(min_tokens: int, num_shared: int) -> None:
    """Only the output counts: the prompt has both end tokens too."""
    server = Server()
    server.begin(0, [EOS, 3, 900], end_token_ids=(EOS, 3), min_tokens=min_tokens)
    server.commit(0, [EOS, 50, 3, 60])
    server.draft(0)
    assert server.proposer.stats().num_tokens == 3 + num_shared


def test_output_after_a_preemption_ends_too() -> None:
    server = Server()
    server.begin(0, [900, 50, 51], num_prompt_tokens=1, end_token_ids=(EOS,), min_tokens=4)
    server.commit(0, [EOS, EOS, *BEHIND])
    server.draft(0)
    assert server.proposer.stats().num_tokens == 3 + 2


@pytest.mark.parametrize(("num_writers", "max_requests"), [(2, 8), (32, 100), (32, 32), (32, 8)])
def test_outputs_written_together_do_not_push_each_other_out(num_writers: int, max_requests: int) -> None:
    drafter = SuffixDrafter(num_writers, VOCAB, SuffixRule(), SuffixLimits(max_requests, 1 << 22))
    table = np.random.default_rng(6).integers(0, VOCAB, (num_writers, 100)).astype(np.int32)
    for table_row in range(num_writers):
        drafter.begin(table_row, 0, bytes(16))
    table_rows, none = np.arange(num_writers, dtype=np.int32), np.zeros(num_writers, np.int32)
    for n in range(1, 101):
        drafter.propose(ProposeInput((), table_rows, table, np.full(num_writers, n, np.int32), none))
    drafter.check_integrity()
    stats = drafter.stats()
    num_kept = min(num_writers, max_requests)
    assert stats.num_outputs == num_kept
    # All were whole when they began, and only tokens of the first step may be lost.
    assert stats.num_tokens >= num_kept * 99
    assert stats.num_sequences <= 3 * num_kept
    tails = [drafter.count(table_row, table[table_row, -6:]) for table_row in range(num_writers)]
    assert sum(any(counts[1:]) for counts in tails) == num_kept


def test_an_output_that_moves_to_a_younger_part_counts_once() -> None:
    server = Server(max_cached_requests=16)
    server.begin(0, [900])
    for i in range(12):
        server.commit(0, [i])
        server.draft(0)
        server.serve(1, [901], [100 + i])
    stats = server.proposer.stats()
    assert stats.num_outputs == 13
    assert stats.num_sequences > stats.num_outputs
    server.proposer._drafter.check_integrity()


def test_a_slot_twice_in_a_step_is_refused() -> None:
    server = Server()
    server.begin(0, PHRASE)
    columns = np.zeros(2, np.int32), np.full(2, len(PHRASE), np.int32), np.ones(2, np.int32)
    with pytest.raises(ValueError, match="table_rows: expected none twice"):
        server.proposer.propose(ProposeInput(("a", "b"), columns[0], server.table, *columns[1:]))
    assert server.draft(0) == []


def test_drafts_of_another_method_are_continued() -> None:
    server = Server()
    server.serve(0, [900], PHRASE)
    server.begin(1, [800, *PHRASE[:4]])
    assert server.draft(1, 3, prefix=PHRASE[4:6]) == PHRASE[6:9]
    assert server.draft(1, 3, prefix=[700]) == []
    assert server.draft(1, 3) == PHRASE[4:7], "a prefix leaves no trace"


def test_the_factor_bounds_drafts_by_the_match() -> None:
    for factor, expected in ((1.0, 3), (0.5, 1), (0.3, 0), (2.0, 6)):
        server = Server(max_spec_factor=factor)
        server.begin(0, [*PHRASE, 1, *PHRASE[:3]])
        assert len(server.draft(0, 10)) == expected


def test_the_context_is_cut_at_the_tree_depth() -> None:
    long_ago, often = [7, *PHRASE[:4], 60], [*PHRASE[:4], 61]
    text = [*long_ago, 8, *often, 9, *often, 7, *PHRASE[:4]]
    for depth, expected in ((64, 60), (5, 60), (4, 61)):
        server = Server(max_tree_depth=depth)
        server.begin(0, text)
        assert server.draft(0, 1) == [expected]


def test_drafting_stops_below_the_joint_probability() -> None:
    text = [*PHRASE[:4], 60, *PHRASE[:4], 61, *PHRASE[:4], 62, *PHRASE[:4], 63]
    for least, expected in ((0.2, True), (0.3, False)):
        server = Server(min_token_prob=least)
        server.begin(0, [*text, *PHRASE[:4]])
        assert (server.draft(0) != []) is expected


def test_nothing_is_kept_without_room() -> None:
    server = Server(max_cached_requests=0)
    server.serve(0, [900], PHRASE)
    server.begin(1, PHRASE[:6])
    assert server.draft(1) == []
    assert server.proposer.stats().num_bytes == 0


def test_the_oldest_outputs_go_first() -> None:
    server = Server(max_cached_requests=8)
    outputs = [list(range(start, start + 12)) for start in range(100, 900, 40)]
    for output in outputs:
        server.serve(0, [900], output)
    assert server.proposer.stats().num_outputs == 8
    found = []
    for output in outputs:
        server.begin(1, output[:6])
        found.append(server.draft(1) == output[6:11])
    assert found == [False] * (len(outputs) - 8) + [True] * 8


def test_slots_of_other_methods_are_left_alone() -> None:
    server = Server()
    server.commit(3, [-5])
    assert server.draft(3, 0) == []
    with pytest.raises(ValueError, match="table_rows: expected to draft for table rows that were begun"):
        server.draft(3, 1)
    server.proposer.forget(np.array([0, 3], np.int32))


def test_wrong_rows_are_refused_and_change_nothing() -> None:
    server = Server()
    server.begin(0, PHRASE)
    server.draft(0)
    server.commit(0, [VOCAB])
    with pytest.raises(ValueError, match="token ids: expected 0 to vocab_size - 1"):
        server.draft(0)
    server.lengths[0] -= 2
    with pytest.raises(ValueError, match="num_tokens: expected no fewer"):
        server.draft(0)
    server.lengths[0] = len(PHRASE)
    with pytest.raises(ValueError, match="token ids"):
        server.draft(0, prefix=[-1])
    with pytest.raises(ValueError, match="table_rows: expected 0 to num_table_rows - 1"):
        server.proposer.forget(np.array([NUM_SLOTS], np.int32))
    server.proposer._drafter.check_integrity()
    assert server.draft(0) == []


def test_drafts_do_not_depend_on_the_number_of_threads() -> None:
    def run() -> list[list[int]]:
        rng = np.random.default_rng(5)
        drafter = SuffixDrafter(16, 8, SuffixRule(), SuffixLimits(12, 1 << 20))
        table, table_rows = rng.integers(0, 3, (16, 200)).astype(np.int32), np.arange(16, dtype=np.int32)
        for table_row in range(16):
            drafter.begin(table_row, 5, bytes([table_row % 3] * 16))
        lengths = range(5, 200, 3)
        budget = np.full(16, 6, np.int32)
        rows = [ProposeInput((), table_rows, table, np.full(16, n, np.int32), budget) for n in lengths]
        return [drafter.propose(row).token_ids.tolist() for row in rows]

    before = num_threads()
    try:
        set_num_threads(1)
        alone = run()
        set_num_threads(4)
        assert alone == run()
    finally:
        set_num_threads(before)


def sequences_of(texts: Sequence[np.ndarray], salts: Sequence[int]) -> SuffixSequences:
    cu_tokens = np.cumsum([0, *map(len, texts)])
    digests = np.array([list(int(salt).to_bytes(16, "little")) for salt in salts], np.uint8)
    return SuffixSequences(digests, cu_tokens, np.concatenate(texts).astype(np.int32))


MAX_STEPS_PER_TOKEN = 160
ADVERSARIES: dict[str, Callable[[np.random.Generator], list[np.ndarray]]] = {
    "one token": lambda rng: [np.full(100_000, 7)],
    "two tokens": lambda rng: [np.tile([7, 8], 20_000), np.repeat([7, 8], 10_000)],
    "two random tokens": lambda rng: [rng.integers(0, 2, 40_000)],
    "any token": lambda rng: [rng.integers(0, VOCAB, 40_000)],
    "a ruler": lambda rng: [np.array([(i & -i).bit_length() for i in range(1, 40_000)])],
    "all but the same": lambda rng: [np.concatenate([np.full(200, 7), [i]]) for i in range(200)],
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_text_makes_appending_slow_or_large(name: str) -> None:
    """In elementary steps: states visited and transitions copied."""
    texts = ADVERSARIES[name](np.random.default_rng(0))
    drafter = SuffixDrafter(1, VOCAB, SuffixRule(), SuffixLimits(-1, 1 << 20))
    drafter.import_sequences(sequences_of(texts, [0] * len(texts)))
    stats = drafter.stats()
    assert stats.num_bytes <= 1 << 20
    assert stats.num_tokens > 1000
    assert stats.num_steps < MAX_STEPS_PER_TOKEN * sum(map(len, texts))
    drafter.check_integrity()


def test_many_salts_stay_within_the_bytes() -> None:
    rng = np.random.default_rng(1)
    drafter = SuffixDrafter(1, VOCAB, SuffixRule(), SuffixLimits(-1, 1 << 20))
    texts = [rng.integers(0, VOCAB, int(n)) for n in rng.integers(1, 60, 3000)]
    drafter.import_sequences(sequences_of(texts, range(3000)))
    stats = drafter.stats()
    assert stats.num_bytes <= 1 << 20
    assert 100 < stats.num_salts == stats.num_shards < 1000
    drafter.check_integrity()


def test_a_cached_token_takes_at_most_sixty_bytes() -> None:
    """Words of 1 to 4 tokens, drawn as in text: few often, many rarely."""
    rng = np.random.default_rng(2)
    words = [rng.integers(0, VOCAB, int(n)) for n in rng.integers(1, 5, 3000)]
    drawn = np.minimum(rng.zipf(1.3, 100_000) - 1, 2999)
    text = np.concatenate([words[i] for i in drawn])
    drafter = SuffixDrafter(1, VOCAB, SuffixRule(), SuffixLimits(-1, 64 << 20))
    drafter.import_sequences(sequences_of([text], [0]))
    stats = drafter.stats()
    assert stats.num_tokens == len(text)
    assert stats.num_bytes < 60 * stats.num_tokens
