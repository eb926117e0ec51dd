"""What ranks that have a GPU each exchange values through, opened before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.experts import GpuExperts
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.sharing import reaches
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.worker.ranks.rank_group import ExpertPlace, RankGroup


def with_gpus(config: Config, group: RankGroup) -> RankGroup:
    """Return the group with the communicator of its passes on the chosen device, which runs its experts too.

    All ranks call it. Raises ConfigError: two of the GPUs cannot read each other's memory, or share none.
    """
    found = device()
    if not isinstance(found, CudaDevice):
        return group
    if group.experts is not None and group.expert_place is not None:
        _share_experts(found, group.expert_place, group.experts)
    if not isinstance(group.communicator, Communicator):
        return group
    first = config.parallel.first_rank
    _verify_reach(found.library, first + group.rank, range(first, first + group.size), "tensor_parallel_size")
    try:
        communicator = GpuCommunicator(
            found.library, found.stream, group.communicator, config.parallel.rank_timeout_s, group.exchange
        )
    except ValueError as error:
        raise _no_sharing("tensor_parallel_size", found, error) from None
    found.transfers.on_wait.append(communicator.verify)
    return replace(group, communicator=communicator)


def leave_gpus(group: RankGroup) -> None:
    """Let go of the communicator of `with_gpus` and of shared experts, after the last pass."""
    found = device()
    if not isinstance(found, CudaDevice):
        return
    if isinstance(group.communicator, GpuCommunicator):
        group.communicator.close()
    found.transfers.on_wait.clear()


def _share_experts(found: CudaDevice, place: ExpertPlace, service: ExpertService) -> None:
    """Have a rank's experts run on its GPU."""
    _verify_reach(found.library, place.shard.rank, range(place.shard.size), "enable_expert_parallel")
    try:
        experts = GpuExperts(found.library, found.stream, service, place.file, place.timeout_s)
    except ValueError as error:
        raise _no_sharing("enable_expert_parallel", found, error) from None
    found.transfers.on_wait.insert(0, experts.verify)  # a rank without its experts may come late to a sum


def _verify_reach(library: CudaLibrary, own: int, gpus: range, param: str) -> None:
    for other in gpus:
        if other != own and not reaches(library, own, other):
            raise ConfigError(
                f"{param}: expected GPUs that can read one another's memory (`nvidia-smi topo -p2p r`), got GPUs {own}"
                f" and {other}, which cannot",
                param=param,
            )


def _no_sharing(param: str, found: CudaDevice, error: ValueError) -> ConfigError:
    return ConfigError(
        f"{param}: expected GPUs that share memory between processes, got {found.text}: {error}", param=param
    )
