"""Bits of a step's rows, and what grammars make of drafts: against matchers that take one token after the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.limits import STEP_S
from fastdeploy_sd.types import DraftTokens, NewRequest, Request, VerifyResult, offsets
from fastdeploy_sd.worker.step import guided_request
from fastdeploy_sd.worker.step.guided_rows import GuidedRows
from tests.unit.text.guidance.test_output_matcher import END, FREE, bits, ids, matcher_of, vocabulary

GRAMMAR = 'start: "{" /[a-z]{1,20}/ "}"'
WORD = ids("{hello}")
NUM_DRAFTS = 6
ALL_ZERO = [0] * 128
DEADLINE_S = 120


class Clock:
    """Processor time that goes on by `tick` seconds with each call."""

    now = tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Compiler:
    """Makes matchers; `limits` are those of the next ones."""

    limits = LLParserLimits()

    def __init__(self) -> None:
        self.num_renewed = 0
        self.announced = SimpleQueue[str]()
        self.counts = Counter[str]()

    def matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(vocabulary(), grammar, log_level=0, limits=self.limits)

    def renewed(self, grammar: str) -> LLMatcher:
        self.num_renewed += 1
        return self.matcher(grammar)

    def announce(self, request_id: str) -> None:
        self.announced.put(request_id)

    def count(self, **more: float) -> None:
        self.counts.update(more)


class Step:
    """A step over requests r0, r1 ... in table rows 4, 3 ...; "" = a request without a grammar."""

    def __init__(self, grammars: Sequence[str], outputs: Sequence[Sequence[int]] = ()) -> None:
        self.memory = StepMemory(StepLimits(4, 64, NUM_DRAFTS), 4096)
        self.compiler = Compiler()
        self.clock = Clock()
        self.guided = GuidedRows(self.compiler, self.memory, 5, self.clock)
        self.table_rows = np.arange(4, 4 - len(grammars), -1, dtype=np.int32)
        outputs = outputs or [()] * len(grammars)
        new = [
            NewRequest(
                Request(f"r{i}", np.array([FREE], np.int32), SamplingParams(), 50, 0, (END,), grammar=grammar),
                np.array([FREE, *output], np.int32), 1, (),
            )
            for i, (grammar, output) in enumerate(zip(grammars, outputs, strict=True))
        ]  # fmt: skip
        self.refused = self.guided.admit(new)
        kept = [
            n for n in zip(new, self.table_rows.tolist(), strict=True) if n[0].request.request_id not in self.refused
        ]
        self.guided.update(np.zeros(0, np.int32), kept)

    def run(self, drafts: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """The bits of every row of logits, None = all are allowed."""
        m, n = self.memory, len(drafts)
        m.num_requests, m.num_logits = n, sum(len(row) + 1 for row in drafts)
        m.table_rows[:n] = self.table_rows
        m.cu_num_draft[: n + 1] = offsets([len(row) for row in drafts])
        m.draft_token_ids[: m.cu_num_draft[n]] = [token_id for row in drafts for token_id in row]
        m.cu_num_logits[: n + 1] = offsets([len(row) + 1 for row in drafts])
        m.parent_rows[: m.num_logits] = [j - 1 for row in drafts for j in range(len(row) + 1)]
        with self.guided.masks():
            pass
        assert (m.allowed_rows[m.num_logits :] == -1).all()
        return [None if row < 0 else m.allowed_bits[row].tolist() for row in m.allowed_rows[: m.num_logits].tolist()]

    def held(self) -> frozenset[str]:
        return self.guided.held([f"r{i}" for i in range(self.memory.num_requests)])

    def run_when_ready(self, drafts: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """The same, once no request is held any more."""
        rows = self.run(drafts)
        while any(self.guided.is_late(r) for r in range(len(drafts))):
            self.compiler.announced.get(timeout=DEADLINE_S)
            rows = self.run(drafts)
        return rows

    def advance(self, outputs: Sequence[Sequence[int]]) -> None:
        tokens = np.array([token_id for row in outputs for token_id in row], np.int32)
        self.guided.advance(VerifyResult(tokens, offsets([len(row) for row in outputs]), tokens))


def expected(output: Sequence[int]) -> list[int]:
    matcher = matcher_of(GRAMMAR)
    matcher.consume(list(output))
    return bits(matcher)[0].tolist()


def test_row_j_gets_what_may_follow_its_first_j_drafts() -> None:
    step = Step([GRAMMAR, "", GRAMMAR])
    drafts = [WORD[:3], [FREE, FREE], []]
    for output in ([], WORD[:2]):
        rows = step.run([drafts[0][len(output) :], *drafts[1:]])
        for j in range(4 - len(output)):
            assert rows[j] == expected(WORD[: len(output) + j])
        assert rows[4 - len(output) : -1] == [None] * 3
        assert rows[-1] == expected([])
        # Run again, as where a step failed: no request has gone forward.
        assert rows == step.run([drafts[0][len(output) :], *drafts[1:]])
        step.advance([WORD[:2], [FREE], []])


def test_a_request_goes_on_behind_its_output() -> None:
    [row] = Step([GRAMMAR], [WORD[:2]]).run([()])
    assert row == expected(WORD[:2])


def test_behind_a_refused_draft_nothing_is_allowed_and_the_end_is_no_refusal() -> None:
    step = Step([GRAMMAR])
    rows = step.run([[WORD[0], FREE, WORD[1]]])
    assert rows[1] == expected(WORD[:1])
    assert rows[2] == ALL_ZERO
    assert rows[3] == ALL_ZERO
    step.advance([WORD])
    [row, _] = step.run([[END]])
    assert np.flatnonzero(np.unpackbits(np.array(row, np.int32).view(np.uint8), bitorder="little")).tolist() == [END]
    step.advance([[END, FREE]])
    assert step.guided.failure(0, np.zeros((2, 4096), np.float32)) is not None
    assert not step.guided.matcher(4).error


def test_drafts_are_cut_at_the_first_that_is_refused() -> None:
    step = Step([GRAMMAR, "", GRAMMAR])
    rows = [[*WORD, END, FREE], [FREE, FREE], [WORD[0], FREE, *WORD]]
    drafts = DraftTokens(
        np.array([i for row in rows for i in row], np.int32),
        offsets([len(r) for r in rows]),
        np.arange(sum(map(len, rows)), dtype=np.int8),
    )
    cut = step.guided.cut(drafts, step.table_rows)
    assert [cut.row(r).tolist() for r in range(3)] == [[*WORD, END], [FREE, FREE], [WORD[0]]]
    assert cut.sources is not None
    first = len(rows[0])
    assert cut.sources.tolist() == [*range(first - 1), first, first + 1, first + 2]
    assert step.guided.cut(cut, step.table_rows) is cut


def test_who_cannot_go_on_is_told_why_and_nobody_else_is() -> None:
    step = Step([GRAMMAR, GRAMMAR, "", GRAMMAR], [(), [FREE], (), ()])
    assert list(step.refused) == ["r1"]
    assert "none that the grammar allows" in str(step.refused["r1"])
    step = Step([GRAMMAR, GRAMMAR, ""])
    step.run([[], [], []])
    step.advance([[FREE], WORD[:1], [FREE]])
    rows = step.run([[WORD[0]], [], []])
    assert rows[0] == ALL_ZERO
    assert rows[1] == ALL_ZERO
    assert rows[2] == expected(WORD[:1])
    logits = np.zeros((4, 4096), np.float32)
    failures = [step.guided.failure(r, logits) for r in range(3)]
    assert failures[0] is not None
    assert failures[0][0] == "BadRequest"
    assert "none that the grammar allows" in failures[0][1]
    assert failures[1] is not None
    assert "bad_words, logit_bias" in failures[1][1]
    assert failures[2] is None
    logits[2, 9] = np.nan
    assert step.guided.failure(1, logits) is None


def test_a_grammar_too_complex_for_a_step_fails_its_request() -> None:
    step = Step(["", GRAMMAR])
    step.compiler.limits = LLParserLimits(step_max_items=1)
    first, second = step.run([[], []])
    assert first is None
    assert second is not None
    new = Request(
        "late",
        np.array([FREE], np.int32),
        SamplingParams(),
        50,
        0,
        (END,),
        grammar='start: ("a" | "b" "c" | /[d-z]+/ "e")+',
    )
    assert not step.guided.admit([NewRequest(new, np.array([FREE], np.int32), 1, ())])
    step.guided.update(step.table_rows[1:2], [(NewRequest(new, np.array([FREE], np.int32), 1, ()), 3)])
    first, second = step.run_when_ready([[], []])
    assert first is None
    assert second is not None
    assert second == ALL_ZERO
    failure = step.guided.failure(1, np.zeros((2, 4096), np.float32))
    assert failure is not None
    assert failure[0] == "BadRequest"


def test_without_a_compiler_a_grammar_is_refused() -> None:
    guided = GuidedRows(None, StepMemory(StepLimits(1, 8), 64), 1)
    request = Request("r", np.array([FREE], np.int32), SamplingParams(), 5, 0, (END,))
    news = [NewRequest(replace(request, grammar=grammar), request.prompt_token_ids, 1, ()) for grammar in ("", GRAMMAR)]
    assert guided.admit(news[:1]) == {}
    with pytest.raises(Exception, match="compiles no grammars"):
        raise guided.admit(news[1:])["r"]
    guided.close()
    guided.close()


def test_rows_have_their_bits_also_where_other_requests_have_used_the_automata_up() -> None:
    grammar = "start: /(a|b)*a(a|b){8}c/"
    Compiler.limits, limits = LLParserLimits(max_lexer_states=300), Compiler.limits
    try:
        step = Step([grammar, grammar])
        exact = matcher_of(grammar)
        for letter in random.Random(0).choices("ab", k=200):
            token_ids = ids(letter)
            rows = step.run_when_ready([token_ids, token_ids])
            assert rows[0] == rows[2] == bits(exact)[0].tolist()
            exact.consume(token_ids)
            assert rows[1] == rows[3] == bits(exact)[0].tolist()
            step.advance([token_ids, token_ids])
            assert not step.guided.matcher(4).error
        assert step.compiler.num_renewed > 1
    finally:
        Compiler.limits = limits


LONG = 'start: "{" /[a-z]*/ "}"'


@pytest.mark.slow
def test_a_mask_over_the_budget_of_a_step_is_computed_off_it_and_is_the_same() -> None:
    step, exact = Step([LONG, ""]), matcher_of(LONG)
    step.clock.tick = 2 * STEP_S

    def go_on(letter: str) -> int:
        assert step.run_when_ready([[], []]) == [bits(exact)[0].tolist(), None]
        exact.consume(ids(letter))
        step.advance([ids(letter), [FREE]])
        assert step.held() <= {"r0"}
        return step.compiler.counts["num_masks"]

    # No step computes any, until they have been cheap for a while.
    assert [go_on(letter) for letter in "{abc"] == [0, 0, 0, 0]
    assert step.compiler.counts["num_late_masks"] == 4
    step.clock.tick = 0.0
    num_late = 0
    while go_on("d") == 0:
        num_late += 1
    assert 5 < num_late < 50
    step.guided.close()


def test_who_has_dear_masks_has_fewer_drafts() -> None:
    step = Step([LONG, LONG])
    drafts = DraftTokens(np.array(ids("{" + "ab" * 3) * 2, np.int32), offsets([len(ids("{ababab"))] * 2))
    assert step.guided.cut(drafts, step.table_rows) is drafts
    lengths = []
    for milliseconds in (1, 3, 4, 6):  # of the 10 that each of two may take
        step.guided._requests[4].cost.note(1, milliseconds / 1e3)
        step.run([[], []])
        lengths.append(np.diff(step.guided.cut(drafts, step.table_rows).cu_num_draft).tolist()[0])
    assert lengths == [len(ids("{ababab")), 2, 1, 0]
    forcing, whole = Step(['start: "{\\"an_answer\\":" /[0-9]/ "}"']), ids('{"an_answer":')
    assert forcing.guided.forced(4, 8) == whole
    forcing.guided._requests[4].cost.note(1, 0.4 * STEP_S)
    assert forcing.guided.forced(4, 8) == whole[:1]


def test_a_step_waits_for_no_more_than_its_share_and_holds_the_others() -> None:
    step = Step([LONG, "", LONG, LONG])
    step.clock.tick = STEP_S
    rows = step.run([ids("{a"), [], [], []])
    late = [r for r in range(4) if step.guided.is_late(r)]
    assert late == [0, 2, 3]
    assert [row for row in rows if row is not None] == [ALL_ZERO] * 5
    assert step.held() == {"r0", "r2", "r3"}
    step.clock.tick, first = 0.0, bits(matcher_of(LONG))[0].tolist()
    assert step.run_when_ready([[], [], [], []]) == [first, None, first, first]
    step.guided.close()


@pytest.mark.slow
def test_a_request_that_costs_too_much_in_all_ends_with_an_error_about_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guided_request, "_BACKOFF_FACTOR", 0)  # or it would pause for times of the clock that ticks
    step = Step([LONG, ""])
    step.clock.tick = 1.0
    letters, outputs = iter("{" + "a" * 100), 0
    while not step.guided.matcher(4).error:
        step.run_when_ready([[], []])
        step.advance([ids(next(letters)), [FREE]])
        outputs += 1
    assert 1 < outputs < 11
    step.run_when_ready([[], []])
    failure = step.guided.failure(0, np.zeros((2, 4096), np.float32))
    assert failure is not None
    assert failure[0] == "BadRequest"
    assert "grammar or schema" in failure[1]
    assert "20 ms of processor time a token, and 10 s beyond that" in failure[1]
    assert step.compiler.counts["num_over_budget"] == 1
    step.guided.close()
