"""The service of a rank's experts, where they are spread over ranks: opened before anything is loaded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.expert_service import ExpertService, ServiceShape
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig
from fastdeploy_sd.models.drafters.draft_model import DraftWeights
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.worker.loading.draft_weights import open_draft_weights, used_layers
from fastdeploy_sd.worker.ranks.rank_group import RankGroup

# Python runs no signal's handler inside a native call.
_LEAVE_S = 0.5


def with_experts(config: Config, group: RankGroup) -> RankGroup:
    """Return the group with the service of this rank's experts, if they are spread.

    Raises ConfigError: the model has no experts; CheckpointError, ConfigError: as `load`.
    """
    if not config.parallel.enable_expert_parallel:
        return group
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    verify_expert_parallel(config, decoder)
    if (place := group.expert_place) is None:
        return group
    shape = service_shape(config, decoder, open_draft_weights(config, checkpoint, decoder))
    service = ExpertService.open(place.file, place.shard.rank, shape, place.timeout_s)
    if group.others is not None:
        group.others.share_experts(service)
    return replace(group, experts=service)


def leave_experts(experts: ExpertService, timeout_s: float) -> None:
    """Serve until no other rank runs passes, at most for so long. A signal's handler may end it by what it raises."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(ValueError):  # others are not ready yet
            experts.leave(min(left_s, _LEAVE_S))
            return


def close_experts(group: RankGroup) -> None:
    """Close the service of `with_experts`, after the last pass. May be called twice."""
    if group.experts is not None and group.experts.handle > 0:
        group.experts.close()


def verify_expert_parallel(config: Config, decoder: DecoderConfig) -> None:
    """Refuse a model without experts. Raises ConfigError."""
    if config.parallel.enable_expert_parallel and not decoder.expert_layers:
        raise ConfigError(
            "enable_expert_parallel: expected false, as the checkpoint has no experts, got true",
            param="enable_expert_parallel",
        )


def slots_per_rank(config: Config, num_experts: int) -> int:
    """Return a rank's places for experts of a layer: with balancing one more, for an expert that moves in."""
    eplb, num_ranks = config.parallel.eplb, config.parallel.expert_ranks
    if eplb is None:
        return -(-num_experts // num_ranks)
    return -(-(num_experts + eplb.redundant_experts_num) // num_ranks) + 1


def service_shape(config: Config, target: DecoderConfig, drafts: Mapping[str, DraftWeights]) -> ServiceShape:
    """Return the sizes into which every layer of experts fits that is spread."""
    decoders = [target]
    if config.speculative.draft_tensor_parallel_size != 1:  # else rank 0 has all of their experts
        decoders += [used_layers(config, weights) for weights in drafts.values()]
    layers = [(one.hidden_size, layer.mlp) for one in decoders for layer in one.layers]
    spread = [(hidden, mlp) for hidden, mlp in layers if isinstance(mlp, MoeConfig)]
    num_ranks, hidden = config.parallel.expert_ranks, max(hidden for hidden, _ in spread)
    num_experts = max(moe.num_experts for _, moe in spread)
    s, scheduler = config.speculative, config.scheduler
    return ServiceShape(
        num_ranks=num_ranks,
        num_layers=len(spread),
        num_experts=num_experts,
        num_slots=slots_per_rank(config, num_experts),
        top_k=max(moe.top_k for _, moe in spread),
        hidden_size=hidden,
        row_bytes=hidden * storage(config.model.dtype).itemsize,
        max_tokens=scheduler.max_num_batched_tokens
        + scheduler.max_num_seqs * (s.num_speculative_tokens + s.num_model_steps),
    )
