"""How many steps are skipped where nothing was worth drafting."""

from __future__ import annotations

from fastdeploy_sd.spec_decode.control.method import Backoff

STEP_S, ASKING_S = 1e-3, 1e-4  # asking may take half a percent: of 20 steps one


def plain(backoff: Backoff, *, has_offers: bool = True, is_worth_asking: bool = True) -> int:
    return backoff.note_plain(ASKING_S, STEP_S, is_worth_asking=is_worth_asking, has_offers=has_offers)


def test_skipped_steps_grow_until_asking_takes_half_a_percent() -> None:
    backoff = Backoff()
    lengths = [plain(backoff) for _ in range(60)]
    assert lengths[:2] == [0, 0]
    assert sorted(lengths) == lengths
    assert lengths[-1] == 20
    assert Backoff().note_plain(1.0, STEP_S, is_worth_asking=False, has_offers=True) == 24  # at most


def test_where_asking_was_not_worth_it_all_steps_rest_that_may() -> None:
    assert plain(Backoff(), is_worth_asking=False) == 20


def test_a_few_drafts_end_a_long_backoff() -> None:
    backoff = Backoff()
    for _ in range(1000):
        plain(backoff)
    for _ in range(4):
        backoff.note_drafts()
    assert plain(backoff) == 0


def test_probes_take_turns_with_asking_and_skip_for_as_long_as_they_take() -> None:
    backoff = Backoff()
    assert backoff.num_probes == 0
    plain(backoff, has_offers=False)
    count = 0
    while backoff.num_probes:
        found = backoff.note_probe(ASKING_S / 10, STEP_S)
        assert found <= 2  # a look takes a tenth of asking
        count += 1
    assert count > 3
    plain(backoff, has_offers=False)
    assert backoff.num_probes == count
    plain(backoff, has_offers=True)  # a source with drafts is asked in full
    assert backoff.num_probes == 0
    plain(backoff, has_offers=False)
    backoff.note_drafts()
    assert backoff.num_probes == 0
