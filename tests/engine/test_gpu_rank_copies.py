"""KV of ranks with a GPU each, for the second level and for other instances: pages are those of one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.cli.verify import compare, open_engine, standard_methods
from fastdeploy_sd.engine.engine import Engine
from tests.engine.gpu import blocks_alone, model_with_layers, tiny_config, two_gpus
from tests.engine.test_gpu_handover import goes_on, prefilling
from tests.engine.test_gpu_ranks import on_gpus
from tests.engine.test_gpu_swap import WAY, again, settle

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("kind")]


@pytest.fixture(scope="module")
def kind(kind: str) -> Iterator[str]:
    with two_gpus():
        blocks_alone(kind)  # by an engine that lets go of the device
        yield kind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_layers(tmp_path_factory.mktemp("model"))


@contextmanager
def swapping(model: Path, folder: Path, num_ranks: int) -> Iterator[Engine]:
    base = tiny_config(model)
    base = replace(base, cache=replace(base.cache, swap_space=0.02, swap_folder=str(folder)))
    [mtp] = standard_methods(["mtp"], [2])
    with open_engine(base if num_ranks == 1 else on_gpus(base), WAY, mtp) as engine:
        yield engine


def test_ranks_share_a_second_level_with_one_gpu(kind: str, model: Path, tmp_path: Path) -> None:
    """Two GPUs store blocks, load them again, and one goes on with their file."""
    with swapping(model, tmp_path, 2) as engine:
        again(engine, 0)
        settle(engine)
        assert compare(blocks_alone(kind), again(engine, 1)) is None
        stats = engine.stats()
        assert stats.swap.num_loaded >= 2
        assert stats.num_draft_tokens > 0
        settle(engine)
    with swapping(model, tmp_path, 1) as engine:
        assert engine.stats().swap.num_restored > 0
        assert compare(blocks_alone(kind), again(engine, 2)) is None
        assert engine.stats().swap.num_loaded > 0
        assert (engine.stats().swap.num_failed, engine.stats().swap.num_damaged) == (0, 0)


def test_pages_go_from_two_gpus_to_two_others(kind: str, model: Path) -> None:
    """Through the host; test_gpu_handover has them go directly."""
    with prefilling(model, 2) as source:
        goes_on(kind, model, source, 2, "tcp")
