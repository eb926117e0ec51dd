"""What experts that are spread over ranks take of each, and the memory in which ranks exchange rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.cuda.experts import expert_bytes
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.expert_service import ServiceShape
from fastdeploy_sd.device.expert_types import ExpertLayer
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.ops.bf16 import storage
from fastdeploy_sd.ops.linear_format import format_code
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard
from fastdeploy_sd.worker.ranks.expert_ranks import slots_per_rank

# Layers that have experts, and the bytes of one.
ExpertLayers = Sequence[tuple[MoeConfig, int]]


def most_expert_bytes(config: Config, layers: ExpertLayers) -> int:
    """Return the bytes of the experts of the rank that has most."""
    return sum(slots_per_rank(config, moe.num_experts) * num_bytes for moe, num_bytes in layers)


def exchanged_bytes(
    gpu: CudaLibrary | None, shape: ServiceShape, hidden_size: int, scheme: QuantScheme, moes: Iterable[MoeConfig]
) -> int:
    """Return the bytes in which ranks exchange rows: at most, of the host; or of each GPU, also to run experts."""
    if gpu is None:
        return shape.num_bytes
    fmt, dtype = format_code(scheme.experts), storage(scheme.dtype)
    layers = [
        ExpertLayer(moe.num_experts, hidden_size, moe.intermediate_size, moe.top_k, dtype, fmt, fmt) for moe in moes
    ]
    return expert_bytes(gpu, shape, layers)


def expert_rows(
    config: Config, decoder: DecoderConfig, layers: ExpertLayers, exchanged: int, *, on_gpu: bool
) -> dict[str, str]:
    """Return the row about experts that are spread; raises ConfigError: there are too few for the ranks."""
    num_ranks, moes = config.parallel.expert_ranks, [moe for moe, _ in layers]
    shards = [DecoderShard(decoder, WHOLE_MODEL, Shard(rank, num_ranks)) for rank in range(num_ranks)]
    counts = [len(shard.experts(moe).inputs) for shard in shards for moe in moes]
    if config.parallel.eplb is not None:
        counts = [slots_per_rank(config, moe.num_experts) for moe in moes]
    few, many = min(counts), max(counts)
    each, memory = f"{few}" if few == many else f"{few} or {many}", f"{exchanged / 1e9:.2f} GB of"
    where = f"{memory} each GPU's memory" if on_gpu else f"up to {memory} memory"
    return {
        "experts": f"{each} of {max(moe.num_experts for moe in moes)} of {len(moes)} layers on each of {num_ranks}"
        f" ranks, {most_expert_bytes(config, layers) / 1e9:.2f} GB; {where} in which they exchange rows",
    }
