"""Embeddings of prompts: the same bytes in any batch, in any chunks and after a preemption; means of hidden rows."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, open_engine
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import F32, Pooling, Request, Speculation
from fastdeploy_sd.worker.step.pooled_prompt import PooledPrompt
from tests.engine.models import References

pytestmark = pytest.mark.slow

ROOMY = EngineVariant("roomy", max_num_seqs=8)
EAGER = EngineVariant("eager", max_num_seqs=8, enforce_eager=True)
CHUNKS = EngineVariant(
    "chunks, prefix cache", max_num_seqs=4, max_num_batched_tokens=13, block_size=16, enable_prefix_caching=True
)
TEXTS = [list(range(20, 57)), [7], [5, 9, 4] * 30, list(range(20, 57))]


def ask(name: str, token_ids: list[int], pooling: Pooling | None, max_tokens: int = 0) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(
        name,
        np.array(token_ids, np.int32),
        params,
        max_tokens=max(max_tokens, 1),
        seed=1,
        speculation=Speculation(enabled=False),
        pooling=pooling,
    )


def run(engine: Engine, requests: list[Request]) -> dict[str, F32]:
    """The embedding of each request; each is on the output that ends it, and has no token."""
    for request in requests:
        engine.submit(request)
    found: dict[str, F32] = {}
    while engine.has_work():
        for output in engine.step():
            if output.embedding is not None:
                assert (output.token_ids, output.finish_reason) == ((), "length")
                assert output.num_cached_tokens == 0
                found[output.request_id] = output.embedding
    return found


def test_the_bytes_do_not_depend_on_company_or_pieces(references: References) -> None:
    asked = [(i, pooling) for i in range(len(TEXTS)) for pooling in Pooling]
    requests = [ask(f"{i} {pooling}", TEXTS[i], pooling) for i, pooling in asked]
    with open_engine(references.base("qwen3-tiny"), ROOMY, PLAIN) as engine:
        alone = {r.request_id: run(engine, [r])[r.request_id] for r in requests}
    assert {row.dtype for row in alone.values()} == {np.dtype(np.float32)}
    assert alone["0 mean"].tobytes() == alone["3 mean"].tobytes()
    assert alone["1 mean"].tobytes() == alone["1 last"].tobytes(), "of a single token"
    assert alone["0 mean"].tobytes() != alone["0 last"].tobytes()
    for way in (ROOMY, EAGER, CHUNKS):
        with open_engine(references.base("qwen3-tiny"), way, PLAIN) as engine:
            got = run(engine, [ask("text", TEXTS[2][:20], None, 9), *requests])
            assert {name: row.tobytes() for name, row in got.items()} == {
                name: row.tobytes() for name, row in alone.items()
            }, way.name


def test_the_last_rows_are_those_of_longer_prompts_means(references: References) -> None:
    """The mean of n rows is that of the last rows of n prompts, each a token longer."""
    text = TEXTS[0][:6]
    with open_engine(references.base("qwen3-tiny"), ROOMY, PLAIN) as engine:
        requests = [ask(str(n), text[:n], Pooling.LAST) for n in range(1, 7)]
        got = run(engine, [*requests, ask("mean", text, Pooling.MEAN)])
    rows = np.stack([got[str(n)].astype(np.float64) for n in range(1, 7)])
    np.testing.assert_allclose(got["mean"], rows.mean(axis=0), rtol=1e-6, atol=1e-7)


def test_rows_that_come_again_count_once() -> None:
    rows = np.random.default_rng(1).standard_normal((10, 8))
    rows[2], rows[6] = 1e16, -1e16  # so that the order of the sum shows
    whole = PooledPrompt(Pooling.MEAN)
    whole.add(0, rows)
    for pieces in ("0-4 4-7 4-7 7-10", "0-4 4-7 7-10 7-10", "0-3 0-4 4-10", "0-4 0-4 4-10", "0-4 4-7 0-10"):
        pooled = PooledPrompt(Pooling.MEAN)
        for piece in pieces.split():
            begin, end = map(int, piece.split("-"))
            pooled.add(begin, rows[begin:end])
        assert pooled.result().tobytes() == whole.result().tobytes(), pieces
