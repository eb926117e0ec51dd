"""The real methods side by side in one step draft what each of them drafts alone."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_method, create_proposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext
from fastdeploy_sd.types import DraftSource

CONTEXT = ProposerContext(max_num_seqs=6, max_model_len=300, vocab_size=10)
METHODS = ("ngram", "suffix", "naive", "suffix", "", "ngram")
SOURCES = {"ngram": DraftSource.NGRAM, "suffix": DraftSource.SUFFIX}


def columns(
    rng: np.random.Generator, table_rows: np.ndarray, table: np.ndarray, num_tokens: np.ndarray
) -> ProposeInput:
    return ProposeInput(
        request_ids=tuple(f"r{table_row}" for table_row in table_rows.tolist()),
        table_rows=table_rows,
        token_table=table,
        num_tokens=num_tokens[table_rows],
        max_draft_len=rng.integers(0, 5, len(table_rows)).astype(np.int32),
    )


@pytest.mark.parametrize("configured", ["ngram", "suffix"])
def test_mixed_steps_draft_as_each_method_alone(configured: str) -> None:
    rng = np.random.default_rng(7)
    config = SpeculativeConfig(method=configured, num_speculative_tokens=4)
    methods = [name or configured for name in METHODS]
    router = create_proposer(config, CONTEXT)
    alone = {name: create_method(name, config, CONTEXT) for name in set(methods)}
    table = rng.integers(0, 3, (6, 300)).astype(np.int32)
    num_tokens = np.full(6, 20, np.int32)
    for table_row, name in enumerate(METHODS):
        router.begin([DraftRequest(f"r{table_row}", table_row, 10, 20, method=name)])
        alone[methods[table_row]].begin([DraftRequest(f"r{table_row}", table_row, 10, 20)])
    num_drafts = 0
    for _ in range(60):
        num_tokens += rng.integers(0, 5, 6).astype(np.int32)
        table_rows = rng.permutation(6)[: rng.integers(1, 7)].astype(np.int32)
        x = columns(rng, table_rows, table, num_tokens)
        mixed = router.propose(x)
        num_drafts += len(mixed.token_ids)
        for name, method in alone.items():
            rows = [r for r in range(len(table_rows)) if methods[table_rows[r]] == name]
            if not rows:
                continue
            own = ProposeInput(
                request_ids=tuple(x.request_ids[r] for r in rows),
                table_rows=x.table_rows[rows],
                token_table=table,
                num_tokens=x.num_tokens[rows],
                max_draft_len=x.max_draft_len[rows],
            )
            want = method.propose(own)
            for i, r in enumerate(rows):
                assert mixed.row(r).tolist() == want.row(i).tolist()
                begin, end = mixed.cu_num_draft[r : r + 2]
                assert mixed.sources is None or set(mixed.sources[begin:end].tolist()) <= {SOURCES.get(name)}
    assert num_drafts > 100
