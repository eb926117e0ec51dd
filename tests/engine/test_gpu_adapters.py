"""LoRA adapters on a GPU: steps that start before the last one is over, and adapters that take turns in one place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.cli.verify import run_alone, run_cell, standard_methods
from fastdeploy_sd.cli.verify.requests import with_adapters
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.models.weights.peft import PeftAdapter
from fastdeploy_sd.types import Adapter
from tests.engine.gpu import BATCH, short_requests, small_model, tiny_config
from tests.models.peft_adapters import ALL, ATTENTION, DENSE, write_adapter

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chip")]


# Model -> targets of two adapters.
MODELS = {
    "qwen3-tiny": (ALL, ATTENTION),
    "deepseek_v3-tiny": (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *DENSE), ("kv_a_proj_with_mqa",)),
}


@pytest.mark.parametrize("model", MODELS)
def test_answers_depend_on_nothing_but_the_request_and_its_adapter(model: str, tmp_path: Path) -> None:
    config = tiny_config(small_model(tmp_path / "model", model))
    for name, targets, seed in zip(("one", "two"), MODELS[model], (1, 2), strict=True):
        write_adapter(tmp_path / name, config.model.model, targets, seed=seed)
    lora = LoraConfig(None, tuple(f"{name}={tmp_path / name}" for name in ("one", "two")))
    known = [Adapter(name, PeftAdapter(folder).digest()) for name, folder in lora.modules]
    requests = with_adapters(short_requests()[2:5], known)
    answers = run_alone(replace(config, lora=lora), requests)
    [column] = standard_methods(["ngram"], [3])
    base = replace(config, lora=replace(lora, max_loras=1))
    cell = run_cell(base, BATCH, column, requests, answers)
    assert (cell.difference, cell.missing) == (None, None)
