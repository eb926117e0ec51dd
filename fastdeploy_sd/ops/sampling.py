"""token_logprobs on Paddle tensors; what else chooses tokens works on NumPy logits, see native/sampling.py."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.types import I32, LogprobArrays


def token_logprobs(logits: Tensor, token_ids: I32, num_top: int) -> LogprobArrays:
    """Return log-probability and rank of one token per row and of the num_top best ones.

    Copying the result to the host is the op's part; see `reference.sampling.token_logprobs`.

    Args:
        logits: f32[L, V], as the model gave them.
        token_ids: i32[L].

    Raises:
        ValueError: a shape or dtype disagrees, a token id is outside the vocabulary, or num_top exceeds it.
    """
    return LogprobArrays(*(out.numpy() for out in shim.run("token_logprobs", logits, from_numpy(token_ids), num_top)))
