"""Draws the parts of the package and who imports whom, as docs/images/packages.svg; `scripts/dev fmt` runs it.

Usage: python scripts/package_graph.py

Every arrow leads down: values lie at the bottom, and a part stands right below the lowest of its users. An arrow that
others imply is left out: where a path leads from one part to another, the first may import the second or not.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fastdeploy_sd"
PICTURE = ROOT / "docs" / "images" / "packages.svg"

# What all others stand on, drawn as one: `types`, `rules` and the files at the top that import nothing but one another.
GROUND = "values"
# Folders that are parts of their own, apart from the folder they are in.
SPLIT = ("entrypoints.offline",)

_BOX_W, _BOX_H, _FLOOR_H, _GAP, _MARGIN = 146, 42, 84, 16, 24
_LINE_H = 16
_LANE_W = 10  # of an arrow that passes a floor
_ROUNDS = 40
# What is imported by name: "fastdeploy_sd.worker.executor:create_executor".
_BY_NAME = re.compile(r"fastdeploy_sd\.([\w.]+):\w+")

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">
<style>
text {{ font-family: system-ui, sans-serif; text-anchor: middle; fill: #1f2328 }}
.name {{ font-size: 13px; font-weight: bold }}
.size {{ font-size: 11px; fill: #59636e }}
.box {{ fill: #eef3fa; stroke: #7d8fa9 }}
.paddle {{ fill: #fdeeda; stroke: #bd8a3e }}
.arrow, .named {{ fill: none; stroke: #6e7781; stroke-width: 1.3; marker-end: url(#head) }}
.named {{ stroke-dasharray: 5 4 }}
</style>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#6e7781"/></marker>
<rect width="100%" height="100%" fill="#ffffff"/>"""
_BOX = '<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h}" rx="5"/>'
_TEXT = '<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'
_LEGEND = "An arrow: may use, and all that is below it. Dashed: loads by name when it starts. Amber: imports Paddle."

Arrow = tuple[str, str]


class Part(NamedTuple):
    """One box.

    Attributes:
        num_lines: of its files.
        has_paddle: one of them imports Paddle.
    """

    num_lines: int
    has_paddle: bool


class Graph(NamedTuple):
    """The parts and their arrows.

    Attributes:
        by_name: arrows that exist only as the name of a module in a string.
        ground: what the part GROUND consists of.
    """

    parts: dict[str, Part]
    arrows: set[Arrow]
    by_name: set[Arrow]
    ground: list[str]


def read_graph() -> Graph:
    """Return what the files of the package import, summed up by part."""
    num_lines: dict[str, int] = defaultdict(int)
    with_paddle: set[str] = set()
    imports: set[Arrow] = set()
    names: set[Arrow] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if module.startswith("__"):  # the package's own door
            continue
        source, part = path.read_text(encoding="utf-8"), part_of(module)
        num_lines[part] += len(source.splitlines())
        for name, is_import in _references(ast.parse(source)):
            if name.split(".")[0] == "paddle" and is_import:
                with_paddle.add(part)
            elif name.startswith("fastdeploy_sd."):
                (imports if is_import else names).add((part, part_of(name.removeprefix("fastdeploy_sd."))))
    imports = {(a, b) for a, b in imports if b in num_lines}
    ground = _ground(imports)
    parts = {name: Part(lines, name in with_paddle) for name, lines in num_lines.items() if name not in ground}
    parts[GROUND] = Part(sum(num_lines[name] for name in ground), has_paddle=False)
    arrows, by_name = (
        {(a, GROUND if b in ground else b) for a, b in pairs if a != b and a not in ground}
        for pairs in (imports, names)
    )
    return Graph(parts, arrows, by_name - arrows, sorted(ground))


def _ground(imports: set[Arrow]) -> set[str]:
    ground = {"types", "rules", *(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))}
    while higher := {a for a, b in imports if a in ground and b not in ground}:
        ground -= higher
    return ground


def part_of(module: str) -> str:
    """Return the part of a module given without the package's name."""
    return next((part for part in SPLIT if f"{module}.".startswith(f"{part}.")), module.partition(".")[0])


def _references(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield (module, whether it is imported and not only named)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "fastdeploy_sd":
            yield from ((f"fastdeploy_sd.{alias.name}", True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _BY_NAME.fullmatch(node.value)
            if match:
                yield f"fastdeploy_sd.{match[1]}", False


def reduced(arrows: set[Arrow]) -> list[Arrow]:
    """Return the arrows that no path of others implies.

    Raises:
        ValueError: some parts import each other in a circle.
    """
    below: dict[str, set[str]] = {}

    def reach(part: str, path: tuple[str, ...]) -> set[str]:
        if part in path:
            raise ValueError(f"expected arrows that lead down, got a circle: {' -> '.join((*path, part))}")
        if part not in below:
            direct = {b for a, b in arrows if a == part}
            below[part] = direct.union(*(reach(b, (*path, part)) for b in sorted(direct)))
        return below[part]

    for part in sorted({a for a, _ in arrows}):
        reach(part, ())
    return sorted((a, b) for a, b in arrows if not any(b in below.get(c, ()) for d, c in arrows if d == a))


def floors_of(parts: Sequence[str], arrows: Sequence[Arrow]) -> dict[str, int]:
    """Return part -> floor: the ground is 0, and every other stands as high as its users let it."""
    users = {part: [a for a, b in arrows if b == part] for part in parts}

    def depth(part: str) -> int:
        return 1 + max(map(depth, users[part]), default=-1)

    depths = {part: depth(part) for part in parts}
    return {part: max(depths.values()) - depths[part] for part in parts}


class Layout:
    """Where everything stands. An arrow over several floors is a chain of lanes, one on each floor that it passes."""

    def __init__(self, floors: Mapping[str, int], arrows: Sequence[Arrow]) -> None:
        self.chains: dict[Arrow, list[str]] = {}
        self.floor = dict(floors)
        for a, b in arrows:
            lanes = {f"{a} > {b} @ {floor}": floor for floor in range(floors[a] - 1, floors[b], -1)}
            self.floor |= lanes
            self.chains[a, b] = [a, *lanes, b]
        self._links = [link for chain in self.chains.values() for link in pairwise(chain)]
        num_floors = max(floors.values()) + 1
        self.rows = [sorted(n for n, floor in self.floor.items() if floor == level) for level in range(num_floors)]
        self.x = self._placed()

    def width_of(self, node: str) -> int:
        """Return the width of a box or a lane."""
        return _LANE_W if ">" in node else _BOX_W

    def _placed(self) -> dict[str, float]:
        """Move every node towards the middle of its neighbours, past others and as far as its floor has room."""
        x = {node: 200.0 * i for row in self.rows for i, node in enumerate(row)}
        for _ in range(_ROUNDS):
            for row in (*self.rows, *reversed(self.rows)):
                wanted = {node: self._middle(node, x) for node in row}
                row.sort(key=lambda node: (wanted[node], node))
                places = _spread([wanted[node] for node in row], [self.width_of(node) for node in row])
                x |= dict(zip(row, places, strict=True))
        left = min(x[node] - self.width_of(node) / 2 for node in x)
        return {node: round(value - left + _MARGIN) for node, value in x.items()}

    def _middle(self, node: str, x: Mapping[str, float]) -> float:
        near = [x[b] for a, b in self._links if a == node and b != GROUND] + [x[a] for a, b in self._links if b == node]
        return sum(near) / len(near) if near else x[node]


def _spread(wanted: Sequence[float], widths: Sequence[int]) -> list[float]:
    """Return places as near to the wanted ones as widths and gaps allow, in the given order (least squares)."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + _GAP)
    groups: list[list[float]] = []
    for place, offset in zip(wanted, offsets, strict=True):
        groups.append([place - offset])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [_mean(group) for group in groups for _ in group]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def drawing(graph: Graph) -> str:
    """Return the picture as SVG, with sizes in two digits."""
    arrows = reduced(graph.arrows | graph.by_name)
    layout = Layout(floors_of(sorted(graph.parts), arrows), arrows)
    top = max(layout.floor.values())
    width = max(x + layout.width_of(node) / 2 for node, x in layout.x.items()) + _MARGIN
    height = top * _FLOOR_H + _BOX_H + _LINE_H + 3 * _MARGIN

    def y(node: str) -> float:
        return _MARGIN + (top - layout.floor[node]) * _FLOOR_H

    out = [_HEAD.format(width=width, height=height)]
    for arrow, chain in layout.chains.items():
        xs = [layout.x[node] for node in chain]
        if arrow[1] == GROUND:
            xs[-1] = xs[-2]
        kind, path = "named" if arrow in graph.by_name else "arrow", _curve(list(zip(xs, map(y, chain), strict=True)))
        out.append(f'<path class="{kind}" d="{path}"><title>{arrow[0]} → {arrow[1]}</title></path>')
    for name, part in sorted(graph.parts.items()):
        center, box_w, box_h = layout.x[name], float(_BOX_W), _BOX_H
        if name == GROUND:
            center, box_w, box_h = width / 2, width - 2 * _MARGIN, _BOX_H + _LINE_H
        size = f"{float(f'{part.num_lines:.2g}'):,.0f} lines"
        kind = "paddle" if part.has_paddle else "box"
        out.append(_BOX.format(kind=kind, x=center - box_w / 2, y=y(name), w=box_w, h=box_h))
        out.append(_TEXT.format(kind="name", x=center, y=y(name) + 18, text=name))
        out.append(_TEXT.format(kind="size", x=center, y=y(name) + 34, text=size))
    out.append(_TEXT.format(kind="size", x=width / 2, y=y(GROUND) + 34 + _LINE_H, text=", ".join(graph.ground)))
    out.append(_TEXT.format(kind="size", x=width / 2, y=height - 10, text=_LEGEND))
    return "\n".join([*out, "</svg>", ""])


def is_current() -> bool:
    """Return whether the picture has today's parts and arrows; sizes change too often to be asked for."""
    picture, graph = PICTURE.read_text(encoding="utf-8"), read_graph()
    wanted = {f"{a} → {b}" for a, b in reduced(graph.arrows | graph.by_name)} | graph.parts.keys()
    return wanted == set(re.findall(r'(?:<title>|class="name"[^>]*>)([^<]+)<', picture))


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """The path from the foot of the first point's box to the head of the last one's, upright on every floor."""
    (x, y), *rest = points
    path = f"M{x:g} {y + _BOX_H:g}"
    y += _BOX_H
    for number, (next_x, next_y) in enumerate(rest, 1):
        is_last = number == len(rest)
        bend = (next_y - y) / 2
        path += f" C{x:g} {y + bend:g} {next_x:g} {next_y - bend:g} {next_x:g} {next_y - 2 * is_last:g}"
        path += "" if is_last else f" V{next_y + _BOX_H:g}"
        x, y = next_x, next_y + _BOX_H
    return path


if __name__ == "__main__":
    PICTURE.write_text(drawing(read_graph()), encoding="utf-8")
