"""The communicator of ranks that have a GPU each, opened before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.sharing import reaches
from fastdeploy_sd.device.device import device
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.ranks.rank_group import RankGroup


def with_gpus(config: Config, group: RankGroup) -> RankGroup:
    """Return the group with the communicator of its passes on the chosen device. All ranks call it.

    Raises ConfigError: two of the GPUs cannot read each other's memory.
    """
    found = device()
    if not isinstance(found, CudaDevice) or not isinstance(group.communicator, Communicator):
        return group
    first = config.parallel.first_rank
    own = first + group.rank
    for other in range(first, first + group.size):
        if other != own and not reaches(found.library, own, other):
            raise ConfigError(
                "tensor_parallel_size: expected GPUs that can read one another's memory (`nvidia-smi topo -p2p r`), got"
                f" GPUs {own} and {other}, which cannot",
                param="tensor_parallel_size",
            )
    try:
        communicator = GpuCommunicator(
            found.library, found.stream, group.communicator, config.parallel.rank_timeout_s, group.exchange
        )
    except ValueError as error:
        raise ConfigError(
            f"tensor_parallel_size: expected GPUs that share memory between processes, got {found.text}: {error}",
            param="tensor_parallel_size",
        ) from None
    found.transfers.on_wait = communicator.verify
    return replace(group, communicator=communicator)


def leave_gpus(group: RankGroup) -> None:
    """Close the communicator of `with_gpus`, after the last pass."""
    if isinstance(group.communicator, GpuCommunicator):
        group.communicator.close()
        found = device()
        assert isinstance(found, CudaDevice), "ranks on GPUs, and none is chosen"
        found.transfers.on_wait = None
