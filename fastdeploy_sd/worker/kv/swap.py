"""Opens the second level of the prefix cache: the number, place and key of the slots of `--swap-space`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.device import library
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.drafters.draft_model import DraftWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.worker.kv.block_copier import BlockCopier
from fastdeploy_sd.worker.kv.kv_access import AnyPages, open_mover
from fastdeploy_sd.worker.kv.kv_identity import KvIdentity
from fastdeploy_sd.worker.kv.state_memory import StateMemory
from fastdeploy_sd.worker.kv.swap_file import SwapFile, slot_stride
from fastdeploy_sd.worker.loading.free_memory import free_memory

_GIB = 1 << 30
_log = logging.getLogger(__name__)


def open_block_store(
    config: Config,
    pages: AnyPages,
    states: Sequence[StateMemory],
    identity: KvIdentity,
    checkpoint: ModelSource,
    drafts: Sequence[DraftWeights],
) -> BlockCopier | None:
    """Return the store of block copies, with its thread; None without `--swap-space`.

    `states`: recurrent ones, of the ranks of `pages`.

    Raises ConfigError: not even one block fits, with a snapshot of the states, or memory, disk space or the file is
    not available.
    """
    if not config.cache.swap_bytes:
        return None
    mover, num_pieces = open_mover(pages, states)
    block_bytes = mover.block_bytes
    stride = slot_stride(block_bytes, config.cache.block_size)
    num_slots = config.cache.swap_bytes // stride
    least = 1 + num_pieces
    if num_slots < least:
        what = "one block and one state" if num_pieces else "one block"
        _fail(f"at least {least * stride / _GIB:.6f} ({what})", config)
    folder, path = config.cache.swap_folder, None
    if folder is None:
        left = max(0, free_memory() // config.parallel.engines_on_host - pages.host_bytes)
        if num_slots * stride > left:
            _fail(f"at most {left / _GIB:.3f}, the memory that the KV cache leaves free, or a swap_folder", config)
    else:
        path = Path(folder) / _file_name(config, identity, checkpoint, drafts)
    key = {} if path is None else _key(config, pages, identity, checkpoint, drafts)
    file = SwapFile(path, key, num_slots, block_bytes, config.cache.block_size)
    _log.info(
        "swap space: room for %d blocks in %s, %d of them there from before",
        num_slots, path or "memory", len(file.kept()),
    )  # fmt: skip
    if num_pieces:
        _log.info("swap space: a snapshot of the recurrent states takes the room of %d blocks", num_pieces)
    if num_slots < pages.num_blocks:
        _log.warning(
            "swap_space: %d blocks fit in, fewer than the KV cache's %d: little outlives that",
            num_slots, pages.num_blocks,
        )  # fmt: skip
    return BlockCopier(mover, file, num_pieces)


def _file_name(config: Config, identity: KvIdentity, checkpoint: ModelSource, drafts: Sequence[DraftWeights]) -> str:
    """Return a name that does not change with checkpoint or library, so that a folder does not fill up."""
    place = checkpoint.path.resolve()
    draft_places = [str(draft.checkpoint.path.resolve()) for draft in drafts]
    formats = identity.kv_format, identity.block_size, config.model.dtype, config.model.quantization, device().kind
    digest = hashlib.blake2b(repr((str(place), draft_places, formats)).encode(), digest_size=6)
    engine = f"-engine{config.parallel.local_data_parallel_id}" if config.parallel.data_parallel_size > 1 else ""
    return f"{place.name}-{digest.hexdigest()}{engine}.kvswap"


def _key(
    config: Config, pages: AnyPages, identity: KvIdentity, checkpoint: ModelSource, drafts: Sequence[DraftWeights]
) -> Mapping[str, Any]:
    """Return everything but its tokens that decides the bytes of a block's KV; any build of the kernels may."""
    return {
        "kv": asdict(identity),
        "checkpoint": checkpoint.identity(),
        "drafts": [draft.checkpoint.identity() for draft in drafts],
        "num_model_steps": config.speculative.num_model_steps,
        "pages": [pages.page_bytes(layer) for layer in range(pages.num_layers)],
        "library": hashlib.blake2b(_kernels().read_bytes(), digest_size=16).hexdigest(),
    }


def _kernels() -> Path:
    """Return the library that computes KV."""
    found = device()
    return found.library.path if isinstance(found, CudaDevice) else library.LIBRARY_PATH


def _fail(expected: str, config: Config) -> None:
    raise ConfigError(f"swap_space: expected {expected}, got {config.cache.swap_space:g}", param="swap_space")
