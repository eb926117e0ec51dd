"""Special token ids of a checkpoint."""

from __future__ import annotations

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.checkpoint.checkpoint import Checkpoint
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, is_token_id
from fastdeploy_sd.process.files import read_json

MAX_EOS_TOKEN_IDS = 1024


def read_eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids that end generation: generation_config.json's, else config.json's, else none.

    Raises:
        CheckpointError: neither an integer nor a list of integers, or too many.
    """
    path = checkpoint.path / "generation_config.json"
    values = read_json(path, missing_ok=True)
    if "eos_token_id" not in values:
        path, values = checkpoint.config_path, checkpoint.config
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MAX_EOS_TOKEN_IDS or not all(map(is_token_id, ids)):
        expected = f"at most {MAX_EOS_TOKEN_IDS} token ids from 0 to {MAX_I32}"
        raise CheckpointError(f"{path}: eos_token_id: expected {expected}, got {shown(value)}")
    return tuple(ids)
