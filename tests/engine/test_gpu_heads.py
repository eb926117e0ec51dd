"""Draft heads on a GPU, where their drafts are made after steps whose tokens the host does not know yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fastdeploy_sd.cli.verify import Method, open_engine
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.config import SpeculativeConfig
from tests.engine.gpu import BATCH, tiny_config
from tests.engine.test_gpu_ahead import plain_answers, plain_requests
from tests.models import head_models
from tests.models.dflash_heads import DFLASH, DFlashHead
from tests.models.eagle_heads import HEADS, EagleHead
from tests.models.head_models import HeadReference

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chip")]

TWO_LAYERS = {**DFLASH["dflash of speculators"].config, "aux_hidden_state_layer_ids": [0, 1]}


def make_p_eagle(folder: Path, target: str) -> EagleHead:
    return EagleHead(folder, HEADS["p-eagle of speculators"], target)


def make_dflash(folder: Path, target: str) -> EagleHead:
    return DFlashHead(folder, replace(DFLASH["dflash of speculators"], taps=(1, 2), config=TWO_LAYERS), target)


MAKERS: dict[str, Callable[[Path, str], HeadReference | EagleHead]] = {
    "eagle3": make_p_eagle,
    "dflash": make_dflash,
    "medusa": partial(head_models.make_medusa, numbered=False),
    "hydra": partial(head_models.make_hydra, has_prefix_layer=True),
    "mlp_speculator": head_models.make_mlp_speculator,
}


@pytest.mark.parametrize(
    ("method", "draft_trees"), [*((method, False) for method in MAKERS), ("eagle3", True), ("dflash", True)]
)
def test_answers_are_those_without_drafts(kind: str, method: str, draft_trees: bool, tmp_path: Path) -> None:
    base = tiny_config()
    heads = MAKERS[method](tmp_path / "heads", str(base.model.path))
    k = 8 if draft_trees else 3
    config = SpeculativeConfig(method, k, num_model_steps=3, model=str(heads.path), draft_trees=draft_trees)
    with open_engine(base, BATCH, Method(method, config)) as engine:
        answers = run(engine, plain_requests(4))
        num_drafted = engine.stats().drafts[method].drafted[0]
    assert {name: answer.token_ids for name, answer in answers.items()} == plain_answers(kind)
    assert num_drafted > 0
