"""The table of beginnings: what counts as the same one, who is preferred, and that it stays small."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.cluster.placement import PrefixTable
from fastdeploy_sd.cluster.router.choice import prompt_of

IDLE = InstanceLoad(True, 0, 0, 8)


def body(text: str, **options: object) -> bytes:
    return json.dumps({**options, "messages": [{"role": "user", "content": text}]}).encode()


def give(table: PrefixTable, keys: Sequence[bytes], name: str) -> None:
    assert table.choose({name: IDLE}, keys) == name


def choice(table: PrefixTable, keys: Sequence[bytes], *names: str, home: str | None = None) -> set[str | None]:
    """Who is chosen by a table that is asked again and again."""
    return {table.choose(dict.fromkeys(names, IDLE), keys, home) for _ in range(20)}


def test_what_stands_before_the_prompt_makes_no_difference() -> None:
    table = PrefixTable()
    keys = table.keys_of(prompt_of(body("x" * 2000, temperature=0.5)))
    assert keys == table.keys_of(prompt_of(body("x" * 2000, seed=1, model="m")))
    assert len(keys) > 5
    assert table.keys_of(prompt_of(b'{"prompt" : "' + b"y" * 600)) != []
    assert table.keys_of(prompt_of(b'{"prompt": [1,' + b"2," * 300)) != []


def test_bodies_without_a_prompt_or_with_a_short_one_have_no_keys() -> None:
    for content in (b"", b"{}", b"\xff" * 999, body("short"), b'{"prompt": 5' + b" " * 999, b"prompt" * 500):
        assert PrefixTable().keys_of(prompt_of(content)) == []


def test_the_longest_common_beginning_counts() -> None:
    table = PrefixTable()
    system = b"s" * 1000
    give(table, table.keys_of(system + b"a" * 1000), "one")
    give(table, table.keys_of(system + b"b" * 1000), "two")
    assert choice(table, table.keys_of(system + b"a" * 1000 + b"more"), "one", "two", "three") == {"one"}
    assert choice(table, table.keys_of(system + b"b" * 2000), "one", "two", "three") == {"two"}
    assert choice(table, table.keys_of(system + b"b" * 3000), "one", "three") == {"one"}


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_home_comes_before_others_that_have_seen_no_more(salt: str) -> None:
    table = PrefixTable()
    keys = table.keys_of(b"x" * 1000, salt)
    assert choice(table, [], "home", "other", home="home") == {"home"}
    give(table, keys, "other")
    assert choice(table, table.keys_of(b"x" * 1000, "another"), "home", "other", home="home") == {"home"}
    assert choice(table, keys, "home", "other", home="home") == {"other"}
    give(table, keys, "home")
    give(table, keys, "other")
    assert choice(table, keys, "home", "other", home="home") == {"home"}


def test_a_busy_instance_is_left_alone_whatever_it_has_seen() -> None:
    table = PrefixTable()
    keys = table.keys_of(b"x" * 1000)
    give(table, keys, "busy")
    assert table.choose({"busy": InstanceLoad(True, 8, 0, 8), "idle": IDLE}, keys, home="busy") == "idle"


def test_keys_differ_between_tables() -> None:
    """So no client can make two beginnings collide."""
    assert PrefixTable().keys_of(b"x" * 1000) != PrefixTable().keys_of(b"x" * 1000)


def test_it_stays_small() -> None:
    table = PrefixTable(max_entries=50)
    for i in range(100):
        give(table, table.keys_of(f"{i:03}".encode() * 400), f"instance {i}")
    assert len(table) == 50
    names = ("instance 0", "instance 99", "new")
    assert choice(table, table.keys_of(b"099" * 400), *names) == {"instance 99"}
    assert len(choice(PrefixTable(max_entries=0), [], *names)) > 1
    keys = table.keys_of(b"x" * 1000)
    for i in range(9):
        give(table, keys, f"instance {i}")
    assert table.choose({"instance 4": IDLE, "instance 5": InstanceLoad(True, 2, 0, 8)}, keys) == "instance 5"
    assert len(table.keys_of(b"x" * 1_000_000)) == 64
