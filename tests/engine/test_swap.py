"""The promise with a second level of the prefix cache: the first one is far too small, and nobody can tell."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.conformance import PLAIN, Reference, Way, compare, standard_methods
from fastdeploy_sd.conformance.methods import Method
from fastdeploy_sd.conformance.runs import engine_config, run
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import Request
from fastdeploy_sd.worker.executor import create_executor
from tests.engine.models import References

# Room for one long request or two short ones, so that nothing stays in the first level for long.
WAY = Way("tiny first level", max_num_seqs=3, num_blocks=20, enable_prefix_caching=True, max_num_batched_tokens=64)
METHODS = ["ngram", "suffix", "mtp", "mtp-ngram", "mtp-suffix", "mixed"]
SPACE_GIB = 0.05
DEADLINE_S = 60.0


@contextmanager
def swapping(
    reference: Reference, method: Method = PLAIN, way: Way = WAY, folder: Path | None = None, space: float = SPACE_GIB
) -> Iterator[Engine]:
    """An engine with a second level; without a folder it is memory."""
    base = replace(
        reference.base,
        cache=replace(reference.base.cache, swap_space=space, swap_folder=None if folder is None else str(folder)),
    )
    executor = create_executor(engine_config(base, way, method), method.make_proposer)
    try:
        yield Engine(executor=executor, config=engine_config(base, way, method))
    finally:
        executor.shutdown()


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


@pytest.mark.parametrize("model", ["qwen3-tiny", "ernie4_5_moe-tiny", "int8 KV", "float32", "two MTP layers", "demo"])
def test_same_tokens_with_plain_decoding(references: References, model: str) -> None:
    reference = references.get(model)
    with swapping(reference) as engine:
        check(reference, engine, reference.requests[:16])
        assert engine.stats().swap.num_loaded > 10


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["demo", "int8 KV"])
def test_same_tokens_whatever_the_method(references: References, model: str, method: str) -> None:
    reference, [column] = references.get(model), standard_methods([method], [4], model_method="mtp")
    with swapping(reference, column) as engine:
        check(reference, engine, column.apply(reference.requests[:16]))
        stats = engine.stats()
        assert stats.swap.num_loaded > 10
        assert model != "demo" or stats.num_accepted_tokens > 0
