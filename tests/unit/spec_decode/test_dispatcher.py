from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError, InternalError
from fastdeploy_sd.spec_decode.dispatcher import MethodDispatcher, NaiveProposer, available_methods, create_proposer
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.spec_decode.proposer import (
    DraftRequest,
    ProposeInput,
    Proposer,
    ProposerContext,
    TargetStep,
)
from fastdeploy_sd.types import I32, DraftSource, DraftTokens
from fastdeploy_sd.types.draft_methods import METHODS
from tests.values import i32, rows_of

if TYPE_CHECKING:
    pass

NUM_SLOTS = 6
# The recorders run no model, but mtp is made only where one is loaded.
LOADED = cast(LoadedDraftModel, object())
CONTEXT = ProposerContext(max_num_seqs=NUM_SLOTS, max_model_len=8, vocab_size=100, draft_models={"mtp": LOADED})
# Row s says s s s .., so that drafts tell whose they are.
TABLE = np.repeat(np.arange(NUM_SLOTS, dtype=np.int32)[:, None], 8, axis=1)


class Recorder:
    """Drafts 10 * (its number) + table row as often as allowed, and remembers what it was asked."""

    made: ClassVar[list[Recorder]]
    source = DraftSource.SUFFIX
    num_lookahead_slots = 0

    def __init__(self, config: SpeculativeConfig, context: ProposerContext) -> None:
        self.begun: list[int] = []
        self.forgotten: list[int] = []
        self.inputs: list[ProposeInput] = []
        self.num_closed = 0
        self.made.append(self)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.begun += [request.table_row for request in requests]

    def propose(self, x: ProposeInput) -> DraftTokens:
        self.inputs.append(x)
        token_ids = np.repeat(10 * self.source.value + x.table_rows, x.max_draft_len)
        cu = np.concatenate([[0], np.cumsum(x.max_draft_len)]).astype(np.int32)
        return DraftTokens(token_ids, cu)

    def forget(self, table_rows: I32) -> None:
        self.forgotten += table_rows.tolist()

    def close(self) -> None:
        self.num_closed += 1


class SuffixRecorder(Recorder):
    """Runs no model."""


class MtpRecorder(Recorder):
    """Runs one."""

    source = DraftSource.MTP
    num_lookahead_slots = 2

    def __init__(self, config: SpeculativeConfig, context: ProposerContext, model: LoadedDraftModel) -> None:
        assert model is LOADED
        super().__init__(config, context)


def propose_one(self: Recorder, x: ProposeInput) -> DraftTokens:
    counts = np.minimum(x.max_draft_len, 1)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return DraftTokens(np.repeat(x.table_rows, counts), cu)


@pytest.fixture(autouse=True)
def _recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """suffix and mtp that record; naive and ngram are the real ones."""
    for name, cls in (("suffix", SuffixRecorder), ("mtp", MtpRecorder)):
        monkeypatch.setitem(METHODS, name, replace(METHODS[name], proposer=f"{__name__}:{cls.__name__}"))
        monkeypatch.setattr(cls, "made", [], raising=False)


def begin(proposer: Proposer, methods: dict[int, str]) -> None:
    proposer.begin(
        [DraftRequest(f"r{table_row}", table_row, 2, 4, method=method) for table_row, method in methods.items()]
    )


def step_input(table_rows: Sequence[int], most: Sequence[int]) -> ProposeInput:
    n = np.full(len(table_rows), 4, np.int32)
    target = TargetStep(np.arange(len(table_rows) + 1, dtype=np.int32), n, n, n)
    return ProposeInput(
        tuple(f"r{table_row}" for table_row in table_rows), i32(*table_rows), TABLE, n, i32(*most), target=target
    )


@pytest.mark.parametrize(
    ("config", "methods"),
    [
        (SpeculativeConfig(), ("naive",)),
        (SpeculativeConfig(method="ngram"), ("naive", "ngram", "suffix")),
        (SpeculativeConfig(method="suffix"), ("naive", "ngram", "suffix")),
        (SpeculativeConfig(method="mtp"), ("naive", "ngram", "suffix", "mtp")),
        (SpeculativeConfig(method="mtp", mtp_strategy="with_suffix"), ("naive", "ngram", "suffix", "mtp")),
    ],
)
def test_available_methods(config: SpeculativeConfig, methods: tuple[str, ...]) -> None:
    assert available_methods(config) == methods


def test_a_server_without_speculation_has_no_router() -> None:
    assert type(create_proposer(SpeculativeConfig(), CONTEXT)) is NaiveProposer
    assert type(create_proposer(SpeculativeConfig(method="ngram"), CONTEXT)) is MethodDispatcher


def test_an_unknown_configured_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 'mtpp' \(did you mean 'mtp'\?\)"):
        create_proposer(SpeculativeConfig(method="mtpp"), CONTEXT)


def sources(drafts: DraftTokens) -> list[int]:
    assert drafts.sources is not None
    return drafts.sources.tolist()


def test_a_slot_that_changed_hands_changes_methods() -> None:
    """Also where the step's table rows are the same array as before."""
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {0: "mtp", 1: "suffix"})
    x = step_input([0, 1], [1, 1])
    assert [sources(router.propose(x)) for _ in range(2)] == [[DraftSource.MTP, DraftSource.SUFFIX]] * 2
    router.forget(i32(1))
    with pytest.raises(InternalError, match=r"expected table rows that were begun, got \[1\]"):
        router.propose(x)
    for method, source in (("mtp", DraftSource.MTP), ("suffix", DraftSource.SUFFIX)):
        begin(router, {1: method})
        assert [sources(router.propose(x)) for _ in range(2)] == [[DraftSource.MTP, source]] * 2
        router.forget(i32(1))


def test_a_step_of_one_method_is_passed_on_as_it_is() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {0: "mtp", 1: ""})
    x = step_input([1, 0], [1, 2])
    assert rows_of(router.propose(x)) == [[31], [30, 30]]
    assert MtpRecorder.made[0].inputs[0] is x


def test_every_request_is_drafted_for_by_its_method() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {5: "ngram", 2: "", 0: "naive", 1: "suffix", 4: "mtp", 3: "ngram"})
    drafts = router.propose(step_input([0, 1, 2, 3, 4, 5], [2, 2, 1, 3, 0, 1]))
    assert rows_of(drafts) == [[], [21, 21], [32], [3, 3, 3], [], [5]]
    assert drafts.sources is not None
    suffix, mtp, ngram = DraftSource.SUFFIX, DraftSource.MTP, DraftSource.NGRAM
    assert drafts.sources.tolist() == [suffix, suffix, mtp, ngram, ngram, ngram, ngram]


def test_only_the_model_sees_rows_of_others() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {0: "suffix", 1: "mtp", 2: "suffix"})
    x = step_input([2, 1, 0], [3, 2, 1])
    router.propose(x)
    seen = MtpRecorder.made[0].inputs[0]
    assert seen.request_ids == ("r2", "r1", "r0")
    assert seen.max_draft_len.tolist() == [0, 2, 0]
    assert seen.target is x.target
    seen = SuffixRecorder.made[0].inputs[0]
    assert seen.request_ids == ("r2", "r0")
    assert (seen.table_rows.tolist(), seen.max_draft_len.tolist()) == ([2, 0], [3, 1])
    assert seen.target is None


def test_a_method_without_rows_in_the_step_is_not_asked() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {0: "suffix", 1: "mtp", 2: "naive"})
    assert rows_of(router.propose(step_input([2], [4]))) == [[]]
    assert rows_of(router.propose(step_input([0, 2], [1, 1]))) == [[20], []]
    assert MtpRecorder.made[0].inputs == []
    assert rows_of(router.propose(step_input([], []))) == []


def test_methods_that_no_request_names_are_not_made() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {0: "", 1: "ngram"})
    assert (len(MtpRecorder.made), len(SuffixRecorder.made)) == (1, 0)
    begin(router, {2: "suffix"})
    begin(router, {3: "suffix"})
    assert [made.begun for made in SuffixRecorder.made] == [[2, 3]]


def test_a_configured_cache_file_makes_suffix_at_once() -> None:
    create_proposer(SpeculativeConfig(method="ngram", suffix_decoding_cache_file="cache.bin"), CONTEXT)
    assert len(SuffixRecorder.made) == 1


@pytest.mark.parametrize(
    ("strategy", "tail"), [("default", []), ("with_suffix", [DraftSource.SUFFIX]), ("with_ngram", [DraftSource.NGRAM])]
)
def test_a_hybrid_goes_by_the_name_of_its_model(
    strategy: Literal["default", "with_suffix", "with_ngram"], tail: list[DraftSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model says one token, which is the one that its table row's text repeats; the other method continues it."""
    monkeypatch.setattr(MtpRecorder, "propose", propose_one)
    router = create_proposer(SpeculativeConfig(method="mtp", mtp_strategy=strategy), CONTEXT)
    begin(router, {0: "naive", 1: ""})
    drafts = router.propose(step_input([1, 0], [2, 2]))
    assert drafts.sources is not None
    assert drafts.sources.tolist() == [DraftSource.MTP, *tail]
    assert drafts.cu_num_draft.tolist() == [0, 1 + len(tail), 1 + len(tail)]


def test_a_hybrid_shares_its_second_method_with_those_who_name_it() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp", mtp_strategy="with_suffix"), CONTEXT)
    begin(router, {0: "suffix", 1: "mtp"})
    router.propose(step_input([0, 1], [1, 1]))
    router.forget(i32(0, 1))
    (suffix,) = SuffixRecorder.made
    assert sorted(suffix.begun) == sorted(suffix.forgotten) == [0, 1]
    assert sorted(x.table_rows.tolist() for x in suffix.inputs) == [[0], [1]]


def test_forgetting_reaches_the_requests_method_and_frees_the_slot() -> None:
    router = create_proposer(SpeculativeConfig(method="suffix"), CONTEXT)
    begin(router, {0: "suffix", 1: "ngram", 2: "suffix"})
    router.forget(i32(1, 2, 4))
    assert SuffixRecorder.made[0].forgotten == [2]
    begin(router, {2: "ngram", 1: "suffix"})
    assert rows_of(router.propose(step_input([0, 1, 2], [1, 1, 1]))) == [[20], [21], [2]]
    router.forget(i32(2))
    with pytest.raises(InternalError, match=r"table_rows: expected table rows that were begun, got \[2\]"):
        router.propose(step_input([0, 2], [1, 1]))


def test_a_method_that_is_not_available_is_refused() -> None:
    router = create_proposer(SpeculativeConfig(method="ngram"), CONTEXT)
    with pytest.raises(InternalError, match="r0: method: expected one of naive, ngram, suffix, got 'mtp'"):
        begin(router, {0: "mtp"})


@pytest.mark.parametrize(("method", "num_table_rows"), [("ngram", 0), ("mtp", 2)])
def test_lookahead_is_the_configured_methods(method: str, num_table_rows: int) -> None:
    assert create_proposer(SpeculativeConfig(method=method), CONTEXT).num_lookahead_slots == num_table_rows


def test_closing_closes_every_method_that_was_made() -> None:
    router = create_proposer(SpeculativeConfig(method="mtp"), CONTEXT)
    begin(router, {0: "suffix"})
    router.close()
    assert [made.num_closed for made in (*MtpRecorder.made, *SuffixRecorder.made)] == [1, 1]
