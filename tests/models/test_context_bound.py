"""A checkpoint may claim any context: tables by position have no more rows than its KV cache has tokens."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

from fastdeploy_sd import LLM, SamplingParams
from tests.models import golden

pytestmark = pytest.mark.slow


def test_a_claim_of_two_thousand_million_positions_takes_no_memory(tmp_path: pathlib.Path) -> None:
    path = shutil.copytree(golden.ROOT / "qwen2-tiny", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    answers = []
    for positions in (4096, 2_000_000_000):
        (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
        with LLM(model=str(path), kv_cache_memory_gb=0.01, speculative_config="naive") as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            answers.append(llm.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
