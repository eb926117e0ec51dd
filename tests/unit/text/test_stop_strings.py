"""StopStrings against a definition that looks at the whole text at once; grouping must not matter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.text.stop_strings import StopStrings

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


def first_match(text: str, start: int, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop string) of the match that ends first, after `start`; the longest of those ending together."""
    for end in range(start + 1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return end, max(found, key=len)
    return None


@given(
    st.lists(st.text(alphabet="abc", max_size=3), max_size=20), st.lists(WORDS, max_size=3), st.booleans(), st.data()
)
def test_agrees_with_the_definition(pieces: list[str], stops: list[str], include: bool, data: st.DataObject) -> None:
    num_silent = data.draw(st.integers(0, len(pieces)))
    strings = StopStrings(stops, include)
    shown, match = "", None
    for i, piece in enumerate(pieces):
        text, match = strings.push(piece, can_match=i >= num_silent)
        shown += text
        if match is not None:
            break
    else:
        shown += strings.finish()
    whole = "".join(pieces)
    expected = first_match(whole, len("".join(pieces[:num_silent])), stops)
    if expected is None:
        assert match is None
        assert shown == whole
    else:
        end, stop = expected
        assert match is not None
        assert match.stop == stop
        assert shown == whole[: end if include else end - len(stop)]
        assert len("".join(pieces[:i])) < end <= len("".join(pieces[: i + 1])), "cut at the token that completed it"


@pytest.mark.parametrize("stop", ["aab", "abab", "aabaa", "abaabab"])
def test_a_match_may_begin_inside_a_failed_one(stop: str) -> None:
    """Every text of up to nine letters, so that all the ways back in the automaton are taken."""
    for letters in itertools.product("ab", repeat=9):
        text = "".join(letters)
        shown, match = StopStrings([stop], include_in_output=False).push(text, can_match=True)
        assert (match is not None) is (stop in text), text
        if match is not None:
            assert shown == text[: text.index(stop)]


@given(st.text(alphabet="abc", max_size=30), st.lists(WORDS, max_size=3))
def test_never_shows_what_it_must_take_back(text: str, stops: list[str]) -> None:
    strings, shown = StopStrings(stops, include_in_output=False), ""
    expected = first_match(text, 0, stops)
    limit = len(text) if expected is None else expected[0] - len(expected[1])
    for char in text:
        piece, match = strings.push(char, can_match=True)
        shown += piece
        assert text[:limit].startswith(shown)
        if match:
            break


def test_holds_back_only_what_could_become_a_match() -> None:
    strings = StopStrings(["END"], include_in_output=False)
    assert strings.push("the E", can_match=True) == ("the ", None)
    assert strings.push("N", can_match=True) == ("", None)
    assert strings.push("E", can_match=True) == ("EN", None)
    assert strings.finish() == "E"


def test_a_string_begun_before_min_tokens_may_complete_after() -> None:
    strings = StopStrings(["ab"], include_in_output=False)
    assert strings.push("a", can_match=False) == ("", None)
    text, match = strings.push("b", can_match=True)
    assert text == ""
    assert match is not None


def test_a_string_completed_before_min_tokens_is_text() -> None:
    strings = StopStrings(["ab"], include_in_output=False)
    assert strings.push("ab", can_match=False) == ("ab", None)
    assert strings.push("c", can_match=True) == ("c", None)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("pieces", [["aba", "ba"], ["ab", "a", "b", "a"], ["a", "b", "a", "b", "a"]])
def test_the_end_of_a_string_passed_over_may_begin_the_next(pieces: list[str], include: bool) -> None:
    """ "aba" is passed over at its first end, and completes at its second, which shares a character with the first."""
    strings, shown, position = StopStrings(["aba"], include), "", 0
    for piece in pieces:
        position += len(piece)
        text, match = strings.push(piece, can_match=position > 3)
        shown += text
        assert (match is not None) == (position == 5)
    assert shown == ("ababa" if include else "ab")


@given(st.text(alphabet="ab", max_size=24), st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 24))
def test_matches_end_behind_the_minimum_and_may_begin_before_it(text: str, stops: list[str], minimum: int) -> None:
    strings, shown, ended = StopStrings(stops, include_in_output=True), "", False
    for position, char in enumerate(text, 1):
        piece, match = strings.push(char, can_match=position > minimum)
        shown += piece
        ended = match is not None
        assert ended == (position > minimum and any(text[:position].endswith(stop) for stop in stops))
        if ended:
            break
    assert text.startswith(shown)
    assert ended or shown == text


@pytest.mark.parametrize("include", [True, False])
def test_without_stop_strings_text_passes(include: bool) -> None:
    strings = StopStrings([], include)
    assert strings.push("anything", can_match=True) == ("anything", None)
    assert strings.finish() == ""
