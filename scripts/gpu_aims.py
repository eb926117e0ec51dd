"""What is aimed at on a GPU, each bound with what gpu_check.py found there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Findings = Mapping[str, Any]
Cost = Mapping[str, Any]

# What a stage shows by passing.
_SHOWN = {
    "ops": "op cases give what the references do",
    "memcheck": "compute-sanitizer finds no access out of bounds",
    "racecheck": "compute-sanitizer finds no race",
    "synccheck": "compute-sanitizer finds no barrier that threads miss",
    "golden": "golden checkpoints give the reference's tokens; no answer depends on the method",
    "verify": "the equality matrix holds",
    "served": "the demo model is served, and answers the same with every method",
}
_ATTENTION = re.compile(r"(\d+) requests x (\d+) rows, context (\d+),")
_FEW_ROWS = 64
_LINEAR = re.compile(r", (\d+) rows$")
# Weights of Qwen3-0.6B's linear layers and head in bfloat16, and KV of a token: each is read once in a step.
_LAYERS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 28, 1024, 3072, 16, 8, 128, 151_936
_LAYER_VALUES = _HIDDEN * ((2 * _HEADS + 2 * _KV_HEADS) * _HEAD_DIM + 3 * _INTERMEDIATE)
WEIGHT_BYTES = 2 * (_LAYERS * _LAYER_VALUES + _HIDDEN * _VOCAB)
_KV_BYTES = 2 * 2 * _LAYERS * _KV_HEADS * _HEAD_DIM


def aims(checks: Findings) -> list[dict[str, Any]]:
    """Return text, bound, value and whether it is met, of each aim; both None where no check has found it out.

    Args:
        checks: name -> what gpu_check.result_of returned.
    """
    found = [_aim(text, "passed", checks.get(check, {}).get("passed")) for check, text in _SHOWN.items()]
    return [*found, *_of_kernels(checks), *_of_engines(checks), *_of_steps(checks), *_of_servers(checks)]


def summary(checks: Findings) -> Iterator[str]:
    """Say of every kernel what it took, and its bound, and of every aim that it is missed."""
    for cost in _figures(checks, "kernel times").get("costs", []):
        if cost["bound_us"] is not None:
            took = f"{cost['us']:.1f} us, bound {cost['bound_us']:.1f} us by {cost['limit']}, {cost['bound_share']:.0%}"
            yield f"{cost['kind']}, {cost['text']}: {took}"
    for aim in aims(checks):
        if aim["met"] is False:
            yield f"missed: {aim['aim']}: {aim['bound']}, got {aim['value']}"


def _aim(text: str, bound: str, value: float | bool | None) -> dict[str, Any]:
    """One entry; `bound` is "passed", or a comparison and a number."""
    if value is None:
        return {"aim": text, "bound": bound, "value": None, "met": None}
    kind, _, number = bound.partition(" ")
    is_met = bool(value)
    if kind != "passed":
        is_met = value >= float(number) if kind == ">=" else value <= float(number)
    return {"aim": text, "bound": bound, "value": is_met if kind == "passed" else round(value, 4), "met": is_met}


def _of_kernels(checks: Findings) -> Iterator[dict[str, Any]]:
    costs = _figures(checks, "kernel times").get("costs", [])
    peers = {c["text"]: c["others_us"].values() for c in _figures(checks, "other kernels").get("costs", [])}
    attention = {_numbers(_ATTENTION, c["text"]): c for c in costs if c["kind"] == "attention"}
    verifying = {key: c for key, c in attention.items() if key[1:2] == (8,)}
    text = "attention of 64 requests x 8 rows, GQA 8, context 4k to 32k"
    yield _aim(f"{text}: of the copy bandwidth", ">= 0.8", _of(min, verifying.values(), _copy_share))
    others = [min(peers[c["text"]]) / c["us"] for c in verifying.values() if peers.get(c["text"])]
    yield _aim(f"{text}: the best alternative's time over its own", ">= 1.0", min(others, default=None))
    pair = [attention.get((64, rows, 8192)) for rows in (8, 1)]
    ratio = None if pair[0] is None or pair[1] is None else pair[0]["us"] / pair[1]["us"]
    yield _aim("attention at context 8k: time of 8 rows over that of 1", "<= 1.15", ratio)
    sampling = [c for c in costs if c["kind"] == "sampling"]
    once = _of(max, sampling, lambda c: 1 / c["copy_share"])
    yield _aim("sampling and verifying 256 x 6 rows of 151,936: time over that of reading them once", "<= 1.3", once)
    linear = [(_numbers(_LINEAR, c["text"]), c) for c in costs if c["kind"] == "linear"]
    few = [c for rows, c in linear if rows and rows[0] <= _FEW_ROWS]
    yield _aim("linear layers of up to 64 rows: of the copy bandwidth", ">= 0.8", _of(min, few, _copy_share))
    for kind in ("attention", "linear", "sampling"):
        slowest = _of(min, [c for c in costs if c["kind"] == kind], _bound_share)
        yield _aim(f"{kind}: of its bound, the case that is farthest from it", ">= 0.6", slowest)


def _of_engines(checks: Findings) -> Iterator[dict[str, Any]]:
    decoding = [record["metrics"] for record in _figures(checks, "decoding").get("records", [])]
    waits = _of(max, decoding, lambda metrics: metrics["idle_ms"] / metrics["step_ms"]["p50"])
    yield _aim("decoding: part of a step in which the GPU waits for the host", "<= 0.05", waits)
    for check, text in (("auto", "method auto on recorded texts"), ("drafts", "the best number of drafts")):
        records = _figures(checks, check).get("records", [])
        gain = _of(min if check == "auto" else max, records, lambda record: record["metrics"]["speed_up"])
        yield _aim(f"{text}: tokens per second over plain decoding's", ">= 0.98", gain)


def _of_steps(checks: Findings) -> Iterator[dict[str, Any]]:
    steps = _figures(checks, "step times").get("steps", [])
    copy = _figures(checks, "kernel times").get("rates", {}).get("copy_gb_per_s")
    for count in (1, 8):
        plain = [s for s in steps if (s["requests"], s["rows"]) == (count, count)]
        over = None
        if plain and copy:
            step = min(plain, key=_context)
            num_bytes = WEIGHT_BYTES + count * step["context"] * _KV_BYTES
            over = step["ms"] / (num_bytes / copy / 1e6)
        text = f"a step of Qwen3-0.6B's shape, {count} requests: time over that of copying its bytes"
        yield _aim(text, "<= 1.4286", over)
    alone = {s["rows"]: s["ms"] for s in sorted(steps, key=_context, reverse=True) if s["requests"] == 1}
    ratio = alone[8] / alone[1] if {1, 8} <= alone.keys() else None
    yield _aim("the same, 1 request: time of 8 rows over that of 1", "<= 1.15", ratio)


def _of_servers(checks: Findings) -> Iterator[dict[str, Any]]:
    served = _figures(checks, "served")
    idle = _of(max, served.values(), lambda found: found["idle_share_of_8"])
    yield _aim("eight requests: part of the time in which the GPU waits for the host", "<= 0.05", idle)
    plain, chosen = (served.get(method, {}).get("tokens_per_s") for method in ("naive", "auto"))
    yield _aim(
        "method auto: tokens per second over plain decoding's", ">= 0.98", chosen / plain if plain and chosen else None
    )


def _figures(checks: Findings, check: str) -> Mapping[str, Any]:
    return checks.get(check, {}).get("figures") or {}


def _of(choose: Callable[..., Any], items: Any, value: Callable[[Cost], float | None]) -> float | None:
    found = [number for number in map(value, items) if number is not None]
    return choose(found) if found else None


def _copy_share(cost: Cost) -> float:
    share: float = cost["copy_share"]
    return share


def _bound_share(cost: Cost) -> float | None:
    share: float | None = cost["bound_share"]
    return share


def _context(step: Cost) -> int:
    context: int = step["context"]
    return context


def _numbers(pattern: re.Pattern[str], text: str) -> Sequence[int]:
    found = pattern.search(text)
    return tuple(map(int, found.groups())) if found else ()
