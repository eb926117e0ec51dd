"""The promise over hosts: ranks that exchange over the network give the bytes of one process."""

from __future__ import annotations

import pytest

from fastdeploy_sd.cli.verify import quick_variants, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import engine_config
from tests.engine.models import References
from tests.server.node_process import on_nodes, second_node_of

pytestmark = pytest.mark.slow

# Chunks, prefix hits, preemption, every request in turn.
WAY = quick_variants()[1]
NUM_REQUESTS = 16


@pytest.mark.parametrize("size", [2, 4])
def test_same_tokens_as_one_process(references: References, size: int) -> None:
    """With four ranks, two share memory on each host."""
    reference = references.get("demo")
    [column] = standard_methods(["mtp-ngram"], [3], model_method="mtp")
    requests = reference.requests[:NUM_REQUESTS]
    answers = {r.request_id: reference.answers[r.request_id] for r in requests}
    base = on_nodes(reference.base, size)
    with second_node_of(engine_config(base, WAY, column)):
        cell = run_cell(base, WAY, column, requests, answers)
    assert (cell.difference, cell.missing) == (None, None)
