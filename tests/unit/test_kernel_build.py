"""Building the kernels says what comes and how far it is; nothing where nothing is to be done."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from custom_ops import build
from scripts import kernel_build


def unit(folder: Path, name: str) -> build.Unit:
    source = folder / f"{name}.cc"
    source.touch()
    return build.Unit(source, folder / f"{name}.o", ())


def compile_(unit: build.Unit) -> None:
    unit.obj.with_suffix(".d").write_text(f"{unit.obj}: {unit.source}\n")
    unit.obj.touch()


def test_what_is_to_be_done_and_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_build, "_LOOK_EVERY_S", 0.01)
    units = [unit(tmp_path, name) for name in "abc"]
    compile_(units[0])
    said: list[str] = []

    def work() -> int:
        compile_(units[1])
        while "kernels: 1 of 2 files" not in said:
            time.sleep(0.01)
        compile_(units[2])
        return 0

    assert kernel_build.watched(units, work, said.append) == 0
    assert said[0].startswith("kernels: 2 files to compile, about ")
    assert said[-1].startswith("kernels: compiled after ")
    said.clear()
    assert kernel_build.watched(units, lambda: 0, said.append) == 0
    assert said == []


def test_a_failure_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    assert kernel_build.watched([unit(tmp_path, "a")], lambda: 1, said.append) == 1
    assert said[-1].startswith("kernels: failed after ")


def test_what_is_being_compiled_is_not_current(tmp_path: Path) -> None:
    one = unit(tmp_path, "a")
    compile_(one)
    assert build.is_current(one)
    depfile = one.obj.with_suffix(".d")
    for half in ("", str(one.obj), f"{one.obj}: {one.source} \\\n {tmp_path}/no_such_head"):
        depfile.write_text(half)
        assert not build.is_current(one)
    compile_(one)
    one.obj.unlink()
    assert not build.is_current(one)
