"""The promise with LoRA adapters: a request's tokens do not depend on the adapters of others in its batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.cli.verify import (
    PLAIN,
    EngineVariant,
    Matrix,
    Reference,
    make_reference,
    quick_variants,
    run_alone,
    run_matrix,
    standard_methods,
)
from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.config.lora_section import LoraConfig
from tests.models.mtp_models import layout_of, make_model
from tests.models.peft_adapters import ALL, ATTENTION, write_adapter

MODEL = "qwen3-tiny"
WAYS = [
    *quick_variants()[1:4],
    EngineVariant("blocks of 64, prefix cache", block_size=64, num_blocks=64, enable_prefix_caching=True, num_passes=2),
]


def configured(folder: Path) -> Config:
    """A model with an MTP layer, and two adapters."""
    path = make_model(folder, MODEL, layout_of(MODEL), 1).path
    one = write_adapter(folder / "one", MODEL, ALL, seed=1, rank=4)
    two = write_adapter(folder / "two", MODEL, ATTENTION, seed=2, rank=7)
    return Config(ModelConfig(model=str(path), dtype="bfloat16"), lora=LoraConfig(None, (f"one={one}", f"two={two}")))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(configured(tmp_path_factory.mktemp("adapted")), seed=3, count=18)


def check(matrix: Matrix) -> None:
    assert matrix.differences == []
    assert matrix.gaps == []


def test_each_adapter_changes_what_the_model_says(reference: Reference) -> None:
    texts = {answer.token_ids for answer in reference.answers.values()}
    assert len(texts) > 10
    plain = replace(reference.base, lora=LoraConfig())
    bare = [replace(request, adapter=None) for request in reference.requests]
    answers = run_alone(plain, bare)
    changed = {
        r.request_id for r in bare if answers[r.request_id].token_ids != reference.answers[r.request_id].token_ids
    }
    by_adapter = {r.request_id: "" if r.adapter is None else r.adapter.name for r in reference.requests}
    assert {by_adapter[name] for name in changed} == {"one", "two"}, "and without one it says what it did"


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp", "mtp-suffix", "auto"])
def test_same_tokens_in_any_company(reference: Reference, method: str) -> None:
    [column] = standard_methods([method], [3], model_method="mtp")
    turn = ["ngram", "suffix", "mtp", "mtp-suffix", "auto"].index(method)
    ways = [WAYS[turn % len(WAYS)], WAYS[(turn + 1) % len(WAYS)]]
    check(run_matrix(reference, ways, [PLAIN, column] if turn == 0 else [column]))


def test_same_tokens_where_adapters_wait_for_one_place(reference: Reference) -> None:
    base = replace(reference.base, lora=replace(reference.base.lora, max_loras=1))
    check(run_matrix(replace(reference, base=base), [WAYS[0]], standard_methods(["ngram"], [3])))


def test_eager_execution_gives_the_same(reference: Reference) -> None:
    check(run_matrix(reference, [EngineVariant("eager", enforce_eager=True, num_requests=6)], [PLAIN]))
