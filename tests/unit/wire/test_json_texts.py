"""Strings of a JSON text are found by its bytes, as a parser finds them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.wire.http.json_texts import text_field

NAMES = st.sampled_from(["model", "a", '"model":', "mod\\el", "é"])
VALUES = st.recursive(
    st.none() | st.integers() | NAMES,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(NAMES, parts, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_the_field_is_the_one_that_a_parser_finds(value: dict[str, object], is_ascii: bool, indent: int | None) -> None:
    found = value.get("model")
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert text_field(text.encode(), "model") == (found if isinstance(found, str) else None)


@pytest.mark.parametrize("content", [b"", b"[]", b'"model"', b'{"model": "a', b'["model", "a"]', b'{"model": "\\u12"}'])
def test_what_is_no_object_has_no_field(content: bytes) -> None:
    assert text_field(content, "model") is None
