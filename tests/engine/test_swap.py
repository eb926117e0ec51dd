"""The same answers with a second level of the prefix cache, where the first one is far too small."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, Answer, EngineVariant, Reference, compare, standard_methods
from fastdeploy_sd.cli.verify.methods import Method
from fastdeploy_sd.cli.verify.runs import engine_config, run
from fastdeploy_sd.config import CacheConfig, ModelConfig, ParallelConfig, SpeculativeConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import Request, Speculation
from tests.engine.models import References

pytestmark = pytest.mark.slow

# Room for one long request or two short ones, so that nothing stays in the first level for long.
WAY = EngineVariant(
    "tiny first level", max_num_seqs=3, num_blocks=20, enable_prefix_caching=True, max_num_batched_tokens=64
)
METHODS = ["ngram", "suffix", "mtp", "mtp-ngram", "mtp-suffix", "mixed", "auto", "auto-mtp"]
SPACE_GIB = 0.05
DEADLINE_S = 120.0


@contextmanager
def swapping(
    reference: Reference,
    method: Method = PLAIN,
    way: EngineVariant = WAY,
    folder: Path | None = None,
    space: float = SPACE_GIB,
    num_ranks: int = 1,
) -> Iterator[Engine]:
    """An engine with a second level; without a folder it is memory."""
    num_threads = library.num_threads()
    base = replace(
        reference.base,
        cache=replace(reference.base.cache, swap_space=space, swap_folder=None if folder is None else str(folder)),
        # Slow steps of a busy machine are no hang.
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, rank_timeout_s=60.0),
    )
    executor = create_executor(engine_config(base, way, method), method.make_proposer)
    try:
        yield Engine(executor=executor, config=engine_config(base, way, method))
    finally:
        executor.shutdown()
        library.set_num_threads(num_threads)


def settle(engine: Engine) -> None:
    """Wait until every block that is to be stored is."""
    deadline = time.monotonic() + DEADLINE_S
    while (stats := engine.stats().swap).num_stored + stats.num_lost + stats.num_failed < stats.num_begun_stores:
        assert time.monotonic() < deadline, f"copies do not end: {stats}"
        engine.step()


def check(reference: Reference, engine: Engine, requests: Sequence[Request], num_passes: int = 2) -> None:
    """Run requests several times and compare every answer with plain decoding, alone, without any cache."""
    expected = {r.request_id: reference.answers[r.request_id] for r in requests}
    for _ in range(num_passes):
        assert compare(expected, run(engine, requests, arrivals_per_step=2)) is None
        settle(engine)


@pytest.mark.parametrize(
    "model", ["qwen3-tiny", "ernie4_5_moe-tiny", "int8 KV", "float32", "two MTP layers", "demo", "qwen3_next-tiny"]
)
def test_same_tokens_with_plain_decoding(references: References, model: str) -> None:
    reference = references.get(model)
    with swapping(reference) as engine:
        check(reference, engine, reference.requests[:16])
        assert engine.stats().swap.num_loaded > 10


CELLS = [(model, method) for model in ("demo", "int8 KV") for method in METHODS] + [("demo", "draft_model")]


@pytest.mark.parametrize(
    ("model", "method"),
    [
        *CELLS,
        ("two MTP layers", "mtp"),
        ("two MTP layers", "mixed"),
        *((model, "mtp-ngram") for model in ("deepseek_v3-tiny", "glm4_moe-tiny", "gpt_oss-tiny", "qwen3_5-tiny")),
    ],
)
def test_same_tokens_whatever_the_method(references: References, model: str, method: str) -> None:
    k = 2 if model == "two MTP layers" else 4
    drafting = SpeculativeConfig(model=str(ModelConfig("demo").path)) if method == "draft_model" else None
    reference, [column] = references.get(model), standard_methods([method], [k], drafting, model_method="mtp")
    with swapping(reference, column) as engine:
        check(reference, engine, column.apply(reference.requests[:16]))
        stats = engine.stats()
        assert stats.swap.num_loaded > 10
        assert model != "demo" or stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("model", "num_ranks"),
    [("demo", 2), ("int8 KV", 4), ("deepseek_v3-tiny", 2), ("qwen3_5-tiny", 2)],
)
def test_same_tokens_on_several_ranks(references: References, model: str, num_ranks: int) -> None:
    """The second model has two KV heads, so that with four ranks each is on two."""
    reference, [column] = references.get(model), standard_methods(["mtp-ngram"], [4], model_method="mtp")
    with swapping(reference, column, num_ranks=num_ranks) as engine:
        check(reference, engine, column.apply(reference.requests[:8]))
        assert engine.stats().swap.num_loaded > 10


@pytest.mark.parametrize("model", ["demo", "qwen3_5-tiny"])
def test_same_tokens_when_requests_are_preempted(references: References, model: str) -> None:
    way = replace(WAY, max_num_seqs=6, num_blocks=16)
    reference, [column] = references.get(model), standard_methods(["mtp"], [4], model_method="mtp")
    with swapping(reference, column, way) as engine:
        check(reference, engine, column.apply(reference.requests[:12]))
        assert engine.stats().num_preemptions > 0
        assert engine.stats().swap.num_loaded > 10


@pytest.mark.parametrize("model", ["demo", "qwen3_5-tiny"])
def test_aborts_while_blocks_are_loaded_harm_nobody(references: References, model: str) -> None:
    reference = references.get(model)
    requests, expected = reference.requests[:12], reference.answers
    with swapping(reference) as engine:
        run(engine, requests)
        settle(engine)
        num_waiting = 0
        for serial in range(200):
            victims = [replace(request, request_id=f"{serial} {request.request_id}") for request in requests[:3]]
            for request in victims:
                engine.submit(request)
            engine.step()
            num_waiting += engine.stats().num_waiting_for_kv
            engine.abort([request.request_id for request in victims])
            engine.check_integrity()
        assert num_waiting > 50
        assert compare({r.request_id: expected[r.request_id] for r in requests}, run(engine, requests)) is None
        stats = engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


class Fillers:
    """Requests that share nothing with any other, to push everything out of the first level."""

    def __init__(self, engine: Engine, template: Request) -> None:
        self._engine, self._template, self._random = engine, template, np.random.default_rng(0)
        self._serials = itertools.count()

    def push_out(self) -> None:
        settle(self._engine)
        for _ in range(4):
            prompt = self._random.integers(4, 1000, 160).astype(np.int32)
            name = f"filler {next(self._serials)}"
            run(self._engine, [replace(self._template, request_id=name, prompt_token_ids=prompt, max_tokens=1)])
        settle(self._engine)


def long_request(reference: Reference) -> Request:
    return next(r for r in reference.requests if len(r.prompt_token_ids) > 100 and not r.cache_salt)


def num_swapped_in(engine: Engine, request: Request, expected: Answer) -> int:
    """Run a request; returns how many of its tokens came from the second level."""
    before = engine.stats().num_prefix_swap_hit_tokens
    assert run(engine, [request])[request.request_id] == expected
    return engine.stats().num_prefix_swap_hit_tokens - before


def test_salts_share_no_slot(references: References) -> None:
    reference = references.get("demo")
    request = long_request(reference)
    num_whole = (len(request.prompt_token_ids) - 1) // 16 * 16
    with swapping(reference) as engine:
        fillers, found = Fillers(engine, request), []
        for salt in ("", "a", "b", "", "b"):
            salted = replace(request, cache_salt=salt)
            found.append(num_swapped_in(engine, salted, reference.answers[request.request_id]))
            fillers.push_out()
    assert found == [0, 0, 0, num_whole, num_whole]


def test_requests_with_draft_kv_take_none_from_those_without(references: References) -> None:
    reference, [column] = references.get("demo"), standard_methods(["mtp"], [4], model_method="mtp")
    request = long_request(reference)
    num_whole = (len(request.prompt_token_ids) - 1) // 16 * 16
    with swapping(reference, column) as engine:
        fillers, found = Fillers(engine, request), []
        for method in ("naive", "mtp", "ngram", "mtp"):
            asking = replace(request, speculation=Speculation(method=method))
            found.append(num_swapped_in(engine, asking, reference.answers[request.request_id]))
            fillers.push_out()
    assert found == [0, 0, num_whole, num_whole]


@pytest.mark.parametrize(
    ("model", "method"), [("demo", "naive"), ("demo", "mtp"), ("qwen3_5-tiny", "naive"), ("qwen3_5-tiny", "mtp")]
)
def test_the_next_engine_goes_on_with_the_folder(
    references: References, model: str, method: str, tmp_path: Path
) -> None:
    reference = references.get(model)
    column = PLAIN if method == "naive" else standard_methods([method], [4], model_method="mtp")[0]
    request = long_request(reference)
    expected = reference.answers[request.request_id]
    num_whole = (len(request.prompt_token_ids) - 1) // 16 * 16
    with swapping(reference, column, folder=tmp_path) as engine:
        assert num_swapped_in(engine, request, expected) == 0
        settle(engine)
    for damage, found in ((None, num_whole), (0, 0)):
        if damage is not None:
            _damage_bytes_of_slots(tmp_path)
        with swapping(reference, column, folder=tmp_path) as engine:
            stats = engine.stats().swap
            assert stats.num_restored > 0
            assert num_swapped_in(engine, request, expected) == found
            assert (engine.stats().swap.num_damaged > 0) == (damage is not None)
            settle(engine)
    # What was damaged was computed and stored again.
    with swapping(reference, column, folder=tmp_path) as engine:
        assert num_swapped_in(engine, request, expected) == num_whole


@pytest.mark.parametrize("model", ["demo", "qwen3_5-tiny"])
def test_any_number_of_ranks_goes_on_with_the_folder_of_another(
    references: References, model: str, tmp_path: Path
) -> None:
    reference, [column] = references.get(model), standard_methods(["mtp"], [4], model_method="mtp")
    request = long_request(reference)
    expected = reference.answers[request.request_id]
    num_whole = (len(request.prompt_token_ids) - 1) // 16 * 16
    for num_ranks, found in ((2, 0), (1, num_whole), (2, num_whole)):
        with swapping(reference, column, folder=tmp_path, num_ranks=num_ranks) as engine:
            assert num_swapped_in(engine, request, expected) == found
            settle(engine)
    _damage_bytes_of_slots(tmp_path)
    with swapping(reference, column, folder=tmp_path, num_ranks=2) as engine:
        assert num_swapped_in(engine, request, expected) == 0
        assert engine.stats().swap.num_damaged > 0


def test_kv_of_other_formats_is_not_taken_over(references: References, tmp_path: Path) -> None:
    reference = references.get("qwen3-tiny")
    requests = reference.requests[:6]
    with swapping(reference, folder=tmp_path) as engine:
        run(engine, requests)
        settle(engine)
    other = replace(reference, base=replace(reference.base, model=replace(reference.base.model, dtype="float32")))
    with swapping(other, folder=tmp_path) as engine:
        assert engine.stats().swap.num_restored == 0
    with swapping(reference, standard_methods(["mtp"], [2], model_method="mtp")[0], folder=tmp_path) as engine:
        assert engine.stats().swap.num_restored == 0
    with swapping(reference, folder=tmp_path) as engine:
        assert engine.stats().swap.num_restored > 0
        check(reference, engine, requests)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_second_level_overwrites_and_changes_nothing(references: References) -> None:
    reference = references.get("demo")
    with swapping(reference, space=0.004) as engine:
        assert engine.stats().swap.num_slots < 40
        check(reference, engine, reference.requests[:16], num_passes=3)
        stats = engine.stats().swap
        assert stats.num_evicted > 50
        assert stats.num_used_slots == stats.num_slots


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (CacheConfig(swap_space=1e-7), r"swap_space: expected at least .* \(one block\), got 1e-07"),
        (CacheConfig(swap_space=1e6), "swap_space: expected at most .* the KV cache leaves free, or a swap_folder"),
        (CacheConfig(swap_space=1e6, swap_folder="{}"), "swap_folder: .*expected room for"),
    ],
)
def test_a_size_that_cannot_be_had_ends_the_start(
    references: References, cache: CacheConfig, text: str, tmp_path: Path
) -> None:
    folder = None if cache.swap_folder is None else str(tmp_path)
    cache = replace(cache, num_blocks=8, swap_folder=folder)
    with pytest.raises(ConfigError, match=text):
        create_executor(replace(references.get("demo").base, cache=cache))


def _damage_bytes_of_slots(folder: Path) -> None:
    """Flip a bit in each slot's last kilobytes, behind its record."""
    [path] = folder.iterdir()
    with open(path, "r+b") as file:
        for position in range(8192 - 1, path.stat().st_size, 4096):
            file.seek(position - 600)
            byte = file.read(1)
            file.seek(position - 600)
            file.write(bytes([byte[0] ^ 1]))
