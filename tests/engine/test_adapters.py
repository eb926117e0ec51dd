"""The promise with LoRA adapters: a request's tokens do not depend on the adapters of others in its batch."""

from __future__ import annotations

import random
import shutil
import threading
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
from fastdeploy_sd.cli.verify.answers import AnswerCollector, compare
from fastdeploy_sd.cli.verify.runs import open_engine, run
from fastdeploy_sd.config import Config, ModelConfig, ParallelConfig
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.models.adapters import Adapters, ReadAdapter
from tests.engine.handover_pairs import open_pair
from tests.engine.test_swap import check as check_swap
from tests.engine.test_swap import swapping
from tests.models.mtp_models import layout_of, make_model
from tests.models.peft_adapters import ALL, ATTENTION, write_adapter

pytestmark = pytest.mark.slow
MODEL = "qwen3-tiny"
DECODE = EngineVariant("decode", max_num_seqs=6, num_blocks=300, enable_prefix_caching=True)
PREFILL = EngineVariant("prefill", 4, long_prefill_token_threshold=24, num_blocks=200, enable_prefix_caching=True)
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


def test_ranks_give_the_bytes_of_one(reference: Reference) -> None:
    base = replace(reference.base, parallel=ParallelConfig(tensor_parallel_size=2, rank_timeout_s=60.0))
    check(run_matrix(replace(reference, base=base), [WAYS[1]], standard_methods(["mtp"], [2])))


def test_a_prefill_instance_computes_prompts_with_their_adapters(reference: Reference) -> None:
    [column] = standard_methods(["mtp"], [2], model_method="mtp")
    with open_pair(reference, (DECODE, column), (PREFILL, column), seed=1) as pair:
        assert compare(reference.answers, pair.run(reference.requests, random.Random(0))) is None
        assert pair.decode.stats().num_supplied_tokens["prefill"] > 300
        assert pair.wire.num_failed == 0


def test_a_prefill_instance_refuses_an_adapter_that_it_has_not_loaded(reference: Reference) -> None:
    [column] = standard_methods(["ngram"], [2])
    with open_pair(reference, (DECODE, column), (PREFILL, column), seed=1) as pair:
        pair.prefill.adapters.unload("two")
        assert compare(reference.answers, pair.run(reference.requests, random.Random(0))) is None
        num_of_two = sum(r.adapter is not None and r.adapter.name == "two" for r in reference.requests)
        assert 0 < sum(pair.decode.stats().num_kv_failures.values()) <= num_of_two


def test_the_second_level_of_the_prefix_cache_knows_adapters_apart(reference: Reference) -> None:
    with swapping(reference, standard_methods(["ngram"], [3])[0]) as engine:
        check_swap(reference, engine, reference.requests)
        assert engine.stats().swap.num_loaded > 0


def test_requests_go_on_while_an_adapter_is_read(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read = threading.Event(), Adapters.read

    def read_late(adapters: Adapters, folder: Path) -> ReadAdapter:
        assert folder.name == "one" or may_read.wait(60)
        return read(adapters, folder)

    monkeypatch.setattr(Adapters, "read", read_late)
    of_two = {r.request_id for r in reference.requests if r.adapter is not None and r.adapter.name == "two"}
    collector, ended, num_steps = AnswerCollector(), set[str](), 0
    with open_engine(reference.base, WAYS[0], PLAIN) as engine:
        for request in reference.requests:
            engine.submit(request)
        while engine.has_work():
            for output in engine.step():
                collector.add(output)
                ended |= {output.request_id} if output.finish_reason else set()
            if len(ended | of_two) == len(reference.requests) and not may_read.is_set():
                assert not ended & of_two
                may_read.set()
            num_steps += not may_read.is_set()
    assert num_steps > 100
    assert compare(reference.answers, {name: collector.answer(name) for name in reference.answers}) is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_adapter_whose_files_change_fails_its_requests_alone(
    reference: Reference, tmp_path: Path, num_ranks: int
) -> None:
    for name in ("one", "two"):
        shutil.copytree(dict(reference.base.lora.modules)[name], tmp_path / name)
    lora = LoraConfig(None, tuple(f"{name}={tmp_path / name}" for name in ("one", "two")), max_loras=2)
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, rank_timeout_s=60.0)
    with open_engine(replace(reference.base, lora=lora, parallel=parallel), WAYS[3], PLAIN) as engine:
        write_adapter(tmp_path / "two", MODEL, ATTENTION, seed=9, rank=7)
        collector, errors = AnswerCollector(), dict[str, str]()
        for request in reference.requests:
            engine.submit(request)
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    errors[output.request_id] = output.error[1]
                collector.add(output)
        engine.check_integrity()
        of_two = {r.request_id for r in reference.requests if r.adapter is not None and r.adapter.name == "two"}
        assert errors.keys() == of_two
        assert all("'two' have changed since it was loaded" in text for text in errors.values())
        others = {name: answer for name, answer in reference.answers.items() if name not in of_two}
        assert compare(others, {name: collector.answer(name) for name in others}) is None
        engine.adapters.unload("two")
        again = engine.adapters.load("again", tmp_path / "two").adapter
        [request] = [r for r in reference.requests if r.request_id in of_two][:1]
        answer = run(engine, [replace(request, adapter=again)])[request.request_id]
        assert answer.finish_reason != "error"
