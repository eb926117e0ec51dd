"""Log-probabilities of rows that stay on a GPU: what comes back are the numbers, of any rows in any order."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.ops.logprob_rows import LogprobRows
from fastdeploy_sd.ops.reference import sampling as reference
from fastdeploy_sd.rules.sampling import MAX_LOGPROBS

pytestmark = pytest.mark.slow

ROWS, VOCAB = 9, 3001


def test_calls_of_any_size_share_the_memory(gpu: CudaDevice) -> None:
    rng = np.random.default_rng(2)
    large, small = (rng.standard_normal((rows, VOCAB), np.float32) for rows in (ROWS, 4))
    on_device = {id(logits): gpu.wrap(logits) for logits in (large, small)}
    find = LogprobRows(gpu, on_device[id(large)])
    kept = []
    calls = [(large, [8, 2, 2, 5], 5), (small, [3], 0), (large, list(range(ROWS)), MAX_LOGPROBS), (small, [0, 3], 1)]
    for logits, rows, num_top in [*calls, (large, [], 3)]:
        token_ids = rng.integers(0, VOCAB, len(rows)).astype(np.int32)
        got = find(on_device[id(logits)], np.array(rows, np.intp), token_ids, num_top)
        kept.append((got, reference.token_logprobs(logits, np.array(rows, np.intp), token_ids, num_top)))
    for got, want in kept:  # the next call does not write over what was returned
        for g, w in zip(got, want, strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            np.testing.assert_allclose(g, w, rtol=1.2e-7, atol=3e-7)


@pytest.mark.parametrize(("num_rows", "num_top"), [(ROWS + 1, 1), (1, MAX_LOGPROBS + 1)])
def test_more_than_there_is_room_for_is_refused(gpu: CudaDevice, num_rows: int, num_top: int) -> None:
    logits = gpu.zeros((ROWS, VOCAB), np.float32)
    zeros = np.zeros(num_rows, np.int32)
    with pytest.raises(
        ValueError, match="rows: expected at most 9, with a token and at most 20 alternatives each, got"
    ):
        LogprobRows(gpu, logits)(logits, zeros.astype(np.intp), zeros, num_top)
