"""The table of beginnings: what counts as the same one, who is preferred, and that it stays small."""

from __future__ import annotations

import json

from fastdeploy_sd.router.affinity import PrefixTable


def body(text: str, **options: object) -> bytes:
    return json.dumps({**options, "messages": [{"role": "user", "content": text}]}).encode()


def test_what_stands_before_the_prompt_makes_no_difference() -> None:
    table = PrefixTable()
    keys = table.keys_of(body("x" * 2000, temperature=0.5))
    assert keys == table.keys_of(body("x" * 2000, seed=1, model="m"))
    assert len(keys) > 5
    assert table.keys_of(b'{"prompt" : "' + b"y" * 600) != []
    assert table.keys_of(b'{"prompt": [1,' + b"2," * 300) != []


def test_bodies_without_a_prompt_or_with_a_short_one_have_no_keys() -> None:
    table = PrefixTable()
    for content in (b"", b"{}", b"\xff" * 999, body("short"), b'{"prompt": 5' + b" " * 999, b"prompt" * 500):
        assert table.keys_of(content) == []


def test_the_longest_common_beginning_counts() -> None:
    table = PrefixTable()
    system = "s" * 1000
    table.note(table.keys_of(body(system + "a" * 1000)), "one")
    table.note(table.keys_of(body(system + "b" * 1000)), "two")
    assert table.preferred(table.keys_of(body(system + "a" * 1000 + "more")))[0] == "one"
    assert table.preferred(table.keys_of(body(system + "b" * 2000))) == ["two", "one"]
    assert table.preferred(table.keys_of(body("t" + system))) == []


def test_keys_differ_between_routers() -> None:
    """So nobody can make two beginnings collide."""
    assert PrefixTable().keys_of(body("x" * 1000)) != PrefixTable().keys_of(body("x" * 1000))


def test_it_stays_small() -> None:
    table = PrefixTable(max_entries=50)
    for i in range(100):
        table.note(table.keys_of(body(f"{i:03}" * 400)), f"instance {i}")
    assert len(table) == 50
    assert table.preferred(table.keys_of(body("099" * 400))) == ["instance 99"]
    assert table.preferred(table.keys_of(body("000" * 400))) == []
    keys = table.keys_of(body("x" * 1000))
    for i in range(9):
        table.note(keys, f"instance {i}")
    assert table.preferred(keys) == [f"instance {i}" for i in (8, 7, 6, 5)]
    assert len(table.keys_of(body("x" * 1_000_000))) == 64
