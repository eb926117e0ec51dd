"""Special token ids of a checkpoint."""

from __future__ import annotations

from fastdeploy_sd.checkpoint.checkpoint import Checkpoint
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.files import read_json


def read_eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids that end generation: generation_config.json's, else config.json's, else none.

    Raises:
        CheckpointError: neither an integer nor a list of integers.
    """
    path = checkpoint.path / "generation_config.json"
    generation = read_json(path, missing_ok=True)
    value = generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{path}: eos_token_id: expected token ids, got {value!r}")
    return tuple(ids)
