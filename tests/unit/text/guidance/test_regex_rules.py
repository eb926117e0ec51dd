"""A regular expression counts with its repetitions written out, whatever else it holds."""

from __future__ import annotations

import pytest

from fastdeploy_sd.text.guidance.limits import MAX_EXPANDED, check_repeats


@pytest.mark.parametrize(
    "regex",
    [
        "a" * MAX_EXPANDED,
        f"a{{{MAX_EXPANDED}}}",
        "(ab){10000}",
        "[^a]{1,20000}",
        "[]{9999999}]",
        r"\(\{99999\}",
        "((a|b){10}c){1,600}",
        "a{",
        "a{x}{}",
        ")(",
        "((((",
        "[",
        "\\",
        "(?:a{5,}){2000}",
    ],
)
def test_short_ones_and_odd_ones_pass(regex: str) -> None:
    check_repeats(regex)


@pytest.mark.parametrize(
    "regex",
    [
        "a" * (MAX_EXPANDED + 1),
        "a{20001}",
        "a{1,20001}",
        "a{20001,}",
        "(ab){10001}",
        "a{200}{200}",
        "((a{100}b){10}c){100}",
        "a{99999999999999999999}",
        "([a-z]{1000}|x){21}",
    ],
)
def test_what_becomes_too_long_is_refused(regex: str) -> None:
    with pytest.raises(ValueError, match=f"expected a regular expression of at most {MAX_EXPANDED} characters"):
        check_repeats(regex)
