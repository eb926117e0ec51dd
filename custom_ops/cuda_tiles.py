"""Instructions that a compiled CUDA kernel needs for its work, as cuobjdump shows them. Standard library only.

Of all cycles through a kernel's instructions, which a warp goes around once for a tile of its work, the one with the
least instructions for an operation is sought. No run of the kernel needs fewer, so this bounds its time from below.

Source: E. L. Lawler, "Combinatorial Optimization", 1976: the cycle of the least ratio of cost to time.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from custom_ops import build, cuda_build
from custom_ops.cuda_report import short_names

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_NUMBERS = {"H": "bfloat16", "I": "int8", "Q": "fp8"}
_LOADED_BYTES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Tile:
    """What one warp does in a turn.

    Attributes:
        operations: multiplications and additions of matrix instructions.
        num_bytes: loaded from the GPU's memory by threads, not by bulk copies.
        numbers: that are multiplied: bfloat16 (or others of 16 bits), int8 or fp8.
    """

    instructions: int = 0
    operations: int = 0
    num_bytes: int = 0
    numbers: str = ""

    @property
    def text(self) -> str:
        """For people."""
        work = f"{self.operations / 1e3:.0f} kFLOP" if self.operations else f"{self.num_bytes} bytes"
        return f"{self.instructions} instructions for {work}"

    def __add__(self, other: Tile) -> Tile:
        sums = (self.instructions + other.instructions, self.operations + other.operations)
        return Tile(*sums, self.num_bytes + other.num_bytes, self.numbers or other.numbers)


def tiles(library: pathlib.Path, architecture: str, is_wanted: Callable[[str], bool]) -> dict[str, Tile]:
    """Return the tile of each wanted kernel in a library or object that multiplies matrices or loads, by its name.

    Raises:
        BuildError: there is no cuobjdump, or it fails.
    """
    command = [cuda_build.find_tool("cuobjdump"), "-sass", "-arch", architecture, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise build.BuildError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    texts = re.split(r"^\s*Function : (\w+)$", done.stdout, flags=re.MULTILINE)[1:]
    named = zip(short_names(texts[::2]), texts[1::2], strict=True)
    found = {name: tile_of(text) for name, text in named if is_wanted(name)}
    return {name: tile for name, tile in found.items() if tile is not None}


def tile_of(text: str) -> Tile | None:
    """Return the tile of a kernel's instructions: for operations, or where there are none for loaded bytes."""
    blocks, edges = _graph(text)
    for works in ([tile.operations for tile in blocks], [tile.num_bytes for tile in blocks]):
        if any(works):
            return _cheapest(blocks, edges, works)
    return None


def _graph(text: str) -> tuple[list[Tile], list[tuple[int, int]]]:
    """Blocks of instructions that run together, and which may follow which; after the end the beginning."""
    lines = [(int(at, 16), bool(guard), name, rest) for at, guard, name, rest in _INSTRUCTION.findall(text)]
    jumps = [(i, *jump) for i, jump in enumerate(_jumps(lines))]
    places = {0} | {i + 1 for i, targets, _ in jumps if targets} | {t for _, targets, _ in jumps for t in targets}
    begins = sorted(place for place in places if place < len(lines))
    number = {begin: i for i, begin in enumerate(begins)}
    blocks, edges = list[Tile](), list[tuple[int, int]]()
    for i, (begin, end) in enumerate(zip(begins, [*begins[1:], len(lines)], strict=True)):
        blocks.append(sum((_done_by(name) for _, _, name, _ in lines[begin:end]), Tile()))
        _, targets, goes_on = jumps[end - 1]
        edges += [(i, number[target]) for target in targets if target in number]
        edges += [(i, i + 1)] if goes_on and end < len(lines) else []
    return blocks, edges


def _jumps(lines: Sequence[tuple[int, bool, str, str]]) -> Iterator[tuple[list[int], bool]]:
    """Of each instruction: where it may jump to, and whether the next one may follow. No run of a kernel is longer.

    A warp that has met at a barrier goes on at the place that the barrier was made with.
    """
    index, met = {line[0]: i for i, line in enumerate(lines)}, dict[str, int]()
    for at, has_guard, name, rest in lines:
        kind, found = name.partition(".")[0], re.search(r"(0x[0-9a-f]+)\s*$", rest)
        target = None if found is None else index.get(int(found[1], 16))
        if kind == "BSSY" and target is not None:
            met[rest.split(",")[0].strip()] = target
        if kind == "BRA" and target is not None and found is not None and int(found[1], 16) != at:
            yield [target], has_guard or "P" in rest.split("0x")[0]
        elif kind == "BSYNC":
            yield [met[rest.strip()]] if rest.strip() in met else [], True
        elif kind in ("EXIT", "RET"):
            yield [0], has_guard or "P" in rest
        else:
            yield [], kind != "BRA"


def _cheapest(blocks: Sequence[Tile], edges: Sequence[tuple[int, int]], works: Sequence[int]) -> Tile | None:
    """The cycle with the least instructions for its work, None where no cycle has any."""
    found, most, least = None, sum(tile.instructions for tile in blocks) + 1, 1
    while True:
        costs = [tile.instructions * least - work * most for tile, work in zip(blocks, works, strict=True)]
        cycle = _negative_cycle(costs, edges)
        if cycle is None:
            return found
        found = sum((blocks[i] for i in cycle), Tile())
        most, least = found.instructions, sum(works[i] for i in cycle)


def _negative_cycle(costs: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int] | None:
    """By Bellman and Ford's algorithm, from everywhere at once."""
    distance, before = [0] * len(costs), dict[int, int]()
    while True:
        has_changed = False
        for begin, end in edges:
            if distance[begin] + costs[begin] < distance[end]:
                distance[end], before[end], has_changed = distance[begin] + costs[begin], begin, True
        if not has_changed:
            return None
        if (cycle := _cycle(before)) is not None:
            return cycle


def _cycle(before: Mapping[int, int]) -> list[int] | None:
    seen = dict[int, int]()
    for start in before:
        path, at = list[int](), start
        while at in before and at not in seen:
            seen[at] = start
            path.append(at)
            at = before[at]
        if seen.get(at) == start and at in path:
            return path[path.index(at) :]
    return None


def _done_by(name: str) -> Tile:
    """What an instruction does for one of the warps that issue it: four share a warpgroup's product."""
    if (found := re.fullmatch(r"[HIQ]GMMA\.(\d+)x(\d+)x(\d+)\..*", name)) is not None:
        m, n, k = map(int, found.groups())
        return Tile(1, 2 * m * n * k // 4, 0, _NUMBERS[name[0]])
    if (found := re.fullmatch(r"[HIQ]MMA\.168(\d+)\..*", name)) is not None:
        return Tile(1, 2 * 16 * 8 * int(found[1]), 0, _NUMBERS[name[0]])
    kind, *parts = name.split(".")
    if kind in ("LDG", "LDGSTS"):
        return Tile(1, 0, 32 * next((_LOADED_BYTES[part] for part in parts if part in _LOADED_BYTES), 4))
    return Tile(1)
