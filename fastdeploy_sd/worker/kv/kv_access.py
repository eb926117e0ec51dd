"""The KV of the process's device, for copies: pages for other instances, blocks for the second level."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.kv.block_mover import BlockMover, DeviceBlockMover, HostBlockMover
from fastdeploy_sd.worker.kv.device_pages import DevicePages
from fastdeploy_sd.worker.kv.host_blocks import HostBlocks
from fastdeploy_sd.worker.kv.kv_memory import RankKv
from fastdeploy_sd.worker.kv.kv_pages import KvPages
from fastdeploy_sd.worker.kv.state_memory import StateMemory
from fastdeploy_sd.worker.loading.loading_errors import asking_for_memory

AnyPages = KvPages | DevicePages


def open_pages(config: Config, ranks: Sequence[RankKv], states: Sequence[StateMemory] = ()) -> AnyPages:
    """Return the KV in pages, of all reachable ranks: of every layer where it is sent, else of whole blocks.

    `states`: of the same ranks, which are sent too.

    Raises ConfigError: the GPU or the host has no memory for pages in transfer, or recurrent states are on a GPU.
    """
    found, role = device(), config.splitwise.splitwise_role
    if role == "mixed":
        ranks, states = [rank.of_a_block for rank in ranks], ()
    if not isinstance(found, CudaDevice):
        return KvPages(ranks, states)
    if states:
        raise ConfigError(
            f"splitwise_role: expected mixed on a GPU for a model with recurrent states, got {role}",
            param="splitwise_role",
        )
    with asking_for_memory("kv_cache_memory_gb, splitwise_role", "pages on their way"):
        return DevicePages(found, ranks, is_read=role == "prefill", is_written=role == "decode")


def open_mover(pages: AnyPages, states: Sequence[StateMemory] = ()) -> tuple[BlockMover, int]:
    """Return the mover of blocks to host memory and back, and the pieces that it copies a snapshot of `states` as.

    Raises ConfigError: the GPU or the host has no memory for blocks in transfer.
    """
    if isinstance(pages, KvPages):
        blocks = HostBlocks(pages, states)
        return HostBlockMover(blocks), blocks.num_state_pieces
    if states:
        raise ConfigError(
            "swap_space: expected none on a GPU for a model with recurrent states, got some", param="swap_space"
        )
    with asking_for_memory("kv_cache_memory_gb, swap_space", "blocks on their way"):
        return DeviceBlockMover(pages.blocks), 0
