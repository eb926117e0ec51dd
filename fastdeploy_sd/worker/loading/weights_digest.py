"""The digest of all bytes of a checkpoint's weights: computed once per checkpoint, and kept."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import partial

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.worker.autotune.kept_measurements import keep, load_json, measurements_folder, save_json

# Smaller checkpoints are read again so fast that no file is kept.
_MIN_KEPT_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def weights_digest(config: Config, checkpoint: ModelSource) -> str:
    """Return a digest of all bytes of the files of a checkpoint's tensors, in the order of their names.

    It is kept with the measurements, and is valid while the files keep size, time and samples.
    """
    folder = measurements_folder(config) if checkpoint.num_bytes() >= _MIN_KEPT_BYTES else None
    about = {"checkpoint": checkpoint.identity()}
    path = None if folder is None else folder / _name(checkpoint)
    kept = None if path is None else load_json(path, about, "digest of the weights: computed again")
    if kept is not None and isinstance(kept.get("digest"), str):
        return str(kept["digest"])
    begin = time.perf_counter()
    digest = compute(checkpoint)
    if path is not None:
        place = keep(path, checkpoint.is_unchanged(), partial(save_json, about | {"digest": digest}))
        gigabytes, seconds = checkpoint.num_bytes() / 1e9, time.perf_counter() - begin
        _log.info("digest of the weights: %.2f GB read in %.1f s, %s", gigabytes, seconds, place)
    return digest


def compute(checkpoint: ModelSource) -> str:
    """Return the digest, read from the files: BLAKE2b of the XXH64 of every MiB."""
    digest = hashlib.blake2b(digest_size=16)
    for data in checkpoint.spans(64 * _CHUNK_BYTES):
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(chunk_checksums(data, _CHUNK_BYTES).tobytes())
    return digest.hexdigest()


def _name(checkpoint: ModelSource) -> str:
    """Return the file's name, which does not change with the checkpoint's content."""
    place = checkpoint.path.resolve()
    return f"{place.name}-{hashlib.blake2b(str(place).encode(), digest_size=6).hexdigest()}.weights.json"
