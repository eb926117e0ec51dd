"""The second level of the prefix cache with a GPU's KV: no answer shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from fastdeploy_sd.cli.verify import Answer, EngineVariant, compare, open_engine, run_alone, standard_methods
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import RequestId
from tests.engine.gpu import block_requests, blocks_alone, leaves_no_streams, model_with_layers, tiny_config
from tests.models.rewrite import add_windows

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("kind")]

DEADLINE_S = 120.0
# Room for one request, or two that begin alike: nothing stays in the first level for long.
WAY = EngineVariant("tiny first level", 2, 48, num_blocks=6, enable_prefix_caching=True, arrivals_per_step=2)


def _first(answers: Mapping[RequestId, Answer]) -> dict[RequestId, Answer]:
    return {block_requests()[0].request_id: answers[block_requests()[0].request_id]}


@contextmanager
def swapping(
    method: str = "naive", model: Path | None = None, folder: Path | None = None, device: Literal["cpu", "gpu"] = "gpu"
) -> Iterator[Engine]:
    base = replace(tiny_config(*([model] if model else [])), device=device)
    base = replace(
        base, cache=replace(base.cache, swap_space=0.02, swap_folder=None if folder is None else str(folder))
    )
    [column] = standard_methods([method], [2])
    with open_engine(base, WAY, column) as engine:
        yield engine


def settle(engine: Engine) -> None:
    """Wait until every block that is to be stored is."""
    deadline = time.monotonic() + DEADLINE_S
    while (stats := engine.stats().swap).num_stored + stats.num_lost + stats.num_failed < stats.num_begun_stores:
        assert time.monotonic() < deadline, f"copies do not end: {stats}"
        engine.step()


def again(engine: Engine, number: int, count: int = 3) -> dict[RequestId, Answer]:
    """Run the first ones once more, under names of their own."""
    todo = block_requests()[:count]
    answers = run(engine, [replace(r, request_id=f"{number} {r.request_id}") for r in todo], WAY.arrivals_per_step)
    return {r.request_id: answers[f"{number} {r.request_id}"] for r in todo}


def test_same_tokens_with_blocks_that_went_and_came_back(kind: str) -> None:
    with leaves_no_streams(kind), swapping() as engine:
        again(engine, 0)
        settle(engine)
        num_waiting = 0
        for number in range(1, 10):
            victims = [f"{number} {r.request_id}" for r in block_requests()[:2]]
            for r, name in zip(block_requests(), victims, strict=False):
                engine.submit(replace(r, request_id=name))
            engine.step()
            num_waiting += engine.stats().num_waiting_for_kv
            engine.abort(victims)
            engine.check_integrity()
        assert compare(blocks_alone(kind), again(engine, 10)) is None
        stats = engine.stats().swap
    assert num_waiting > 3
    assert stats.num_loaded > 3
    assert (stats.num_failed, stats.num_damaged) == (0, 0)


@pytest.mark.parametrize(
    ("model", "has_window"), [("qwen3-tiny", False), ("qwen3-tiny", True), ("deepseek_v3-tiny", False)]
)
def test_draft_layers_kv_comes_back_too(kind: str, tmp_path: Path, model: str, has_window: bool) -> None:
    path, expected = model_with_layers(tmp_path, model), blocks_alone(kind)
    if has_window:
        add_windows(path, ["full_attention", "sliding_attention"], 12)
    if has_window or model != "qwen3-tiny":
        expected = run_alone(tiny_config(path), block_requests())
    with swapping("mtp", path) as engine:
        again(engine, 0)
        settle(engine)
        assert compare(expected, again(engine, 1)) is None
        stats = engine.stats()
    assert stats.swap.num_loaded >= 2
    assert stats.num_draft_tokens > 0


def test_a_folder_is_read_by_the_same_device_only(kind: str, tmp_path: Path) -> None:
    with swapping(folder=tmp_path) as engine:
        again(engine, 0, 1)
        settle(engine)
    with swapping(folder=tmp_path) as engine:
        assert engine.stats().swap.num_restored == 2
        assert compare(_first(blocks_alone(kind)), again(engine, 1, 1)) is None
        assert engine.stats().swap.num_loaded == 2
    [path] = tmp_path.iterdir()
    for num_files in (2, 1):
        with swapping(folder=tmp_path, device="cpu") as engine:
            assert engine.stats().swap.num_restored == 0
        assert len(list(tmp_path.iterdir())) == num_files
        if num_files == 2:
            # Under the name that the CPU's has.
            path.replace(next(found for found in tmp_path.iterdir() if found != path))
