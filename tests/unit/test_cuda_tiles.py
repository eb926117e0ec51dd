"""The instructions that a compiled kernel needs for its work, found in its text."""

from __future__ import annotations

import itertools
import os
import pathlib

import numpy as np
import pytest

from custom_ops import build, cuda_tiles
from custom_ops.cuda_tiles import Tile, tile_of

MMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"


def text(*lines: str) -> str:
    """As cuobjdump prints it; an instruction takes 16 bytes, and a number after @ is that of a line."""
    found = []
    for i, line in enumerate(lines):
        guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        name, _, operands = rest.partition(" ")
        if "#" in operands:
            before, _, number = operands.partition("#")
            operands = f"{before}{16 * int(number):#x}"
        found.append(f"        /*{16 * i:04x}*/  {guard + ' ' if guard else ''}{name} {operands} ;  /* 0x00 */")
    return "\n".join(found)


def test_a_tile_is_the_turn_of_the_loop_that_multiplies() -> None:
    loop = [MMA, MMA, "IADD3 R1, R1, 0x1, RZ", "ISETP.GE.AND P0, PT, R1, R2, PT", "@!P0 BRA #2"]
    assert tile_of(text("MOV R1, RZ", "MOV R3, RZ", *loop, "EXIT")) == Tile(5, 2 * 4096, 0, "bfloat16")


def test_what_a_fast_path_jumps_over_does_not_count() -> None:
    lines = ["S2R R0, SR_TID.X", "@P1 BRA #9", "FADD R1, R1, R1", *["FMUL R1, R1, R1"] * 5, MMA]
    lines += [MMA, "@P0 BRA #1", "EXIT"]
    assert tile_of(text(*lines)) == Tile(3, 4096, 0, "bfloat16")


def test_a_place_where_threads_meet_is_where_they_go_on() -> None:
    """A barrier's part of a warp may come from code elsewhere."""
    lines = ["S2R R0, SR_TID.X", "BSSY B0, #4", "@P0 BRA #7", "NOP", "LDG.E.128 R4, [R2.64]", "@P1 BRA #1", "EXIT"]
    lines += ["FADD R1, R1, R1", "BSYNC B0", "BRA #9"]
    assert tile_of(text(*lines)) == Tile(5, 0, 512)
    lines[3] = "EXIT"
    assert tile_of(text(*lines)) == Tile(6, 0, 512)


def test_a_kernel_without_loops_is_one_turn() -> None:
    loads = ["LDG.E R1, [R2.64]", "LDGSTS.E.BYPASS.LTC128B.128 [R3], [R4.64]"]
    assert tile_of(text(*loads, "@P0 EXIT", "STG.E [R2], R1", "EXIT")) == Tile(3, 0, 128 + 512)
    assert tile_of(text("MOV R1, RZ", "EXIT")) is None


@pytest.mark.parametrize(
    ("name", "operations", "numbers"),
    [
        ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16 // 2, "bfloat16"),  # a warpgroup's, of four warps
        ("IGMMA.64x64x32.U8.S8", 64 * 64 * 32 // 2, "int8"),
        ("QGMMA.64x16x32.F32.E4M3.E4M3", 64 * 16 * 32 // 2, "fp8"),
        ("IMMA.16832.U8.S8", 2 * 16 * 8 * 32, "int8"),
        ("QMMA.16832.F32.E4M3.E4M3", 2 * 16 * 8 * 32, "fp8"),
    ],
)
def test_products_count_for_a_warp(name: str, operations: int, numbers: str) -> None:
    assert tile_of(text(f"{name} R4, R8, R12, R4", "EXIT")) == Tile(2, operations, 0, numbers)


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_cycle_of_random_graphs_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 6
    blocks = [Tile(int(rng.integers(1, 9)), int(rng.integers(0, 3))) for _ in range(count)]
    edges = [(i, j) for i, j in itertools.product(range(count), repeat=2) if rng.random() < 0.35]
    ratios = [
        sum(blocks[i].instructions for i in cycle) / work
        for length in range(1, count + 1)
        for cycle in itertools.permutations(range(count), length)
        if all((i, j) in edges for i, j in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        if (work := sum(blocks[i].operations for i in cycle))
    ]
    found = cuda_tiles._cheapest(blocks, edges, [tile.operations for tile in blocks])
    assert (found is None) == (not ratios)
    if found is not None:
        assert found.instructions / found.operations == pytest.approx(min(ratios))


def test_every_function_of_a_library_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_ZN4fdsd4cuda7DoubleKEv", "_ZN4fdsd4cuda5NoneKEv")
    said = "".join(f"\t\tFunction : {name}\n{text(MMA, 'EXIT')}\n" for name in names)
    (tmp_path / "said").write_text(said)
    tool = tmp_path / "cuobjdump"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "-sass -arch sm_90a lib.so" ] && cat {tmp_path}/said\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    library, wanted = pathlib.Path("lib.so"), {"DoubleK": Tile(2, 4096, 0, "bfloat16")}
    assert cuda_tiles.tiles(library, "sm_90a", lambda name: name != "NoneK") == wanted
    with pytest.raises(build.BuildError, match=r"cuobjdump -sass -arch sm_80"):
        cuda_tiles.tiles(library, "sm_80", bool)
