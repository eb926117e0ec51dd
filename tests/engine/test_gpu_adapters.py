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
from tests.engine.gpu import BATCH, short_requests, tiny_config
from tests.models.peft_adapters import ALL, ATTENTION, write_adapter

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chip")]


def test_answers_depend_on_nothing_but_the_request_and_its_adapter(tmp_path: Path) -> None:
    config = tiny_config()
    for name, targets, seed in (("one", ALL, 1), ("two", ATTENTION, 2)):
        write_adapter(tmp_path / name, config.model.model, targets, seed=seed)
    lora = LoraConfig(None, tuple(f"{name}={tmp_path / name}" for name in ("one", "two")))
    known = [Adapter(name, PeftAdapter(folder).digest()) for name, folder in lora.modules]
    requests = with_adapters(short_requests()[2:6], known)
    answers = run_alone(replace(config, lora=lora), requests)
    [column] = standard_methods(["ngram"], [3])
    base = replace(config, lora=replace(lora, max_loras=1))
    cell = run_cell(base, BATCH, column, requests, answers)
    assert (cell.difference, cell.missing) == (None, None)
