"""What a configuration comes to, told before anything is loaded: nothing but headers and config.json is read.

Needs no Paddle. The size of the KV cache follows from the memory that is free now, so it is an estimate unless it is
configured.
"""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_sd.checkpoint import Checkpoint
from fastdeploy_sd.config import Config
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from fastdeploy_sd.parallel.shard import Shard
from fastdeploy_sd.worker import kv_sizing
from fastdeploy_sd.worker.draft_weights import open_draft_weights
from fastdeploy_sd.worker.free_memory import free_memory


def forecast(config: Config, free: Callable[[], int] = free_memory) -> dict[str, str]:
    """Return name -> text of what `serve` would have: weights, KV cache, longest request and drafting.

    All of it with the memory of the CPU: with another device the first line says so, under "forecast".

    Args:
        free: bytes this process may still take.

    Raises:
        CheckpointError: the checkpoint or its draft layers are missing, malformed or of an unsupported architecture.
        ConfigError: an option contradicts the checkpoint or the memory.
    """
    checkpoint = Checkpoint(config.model.path)
    decoder = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
    max_model_len = kv_sizing.max_model_len(config, decoder)
    drafts = open_draft_weights(config, checkpoint, decoder)
    speculative = config.speculative
    shard = Shard(0, config.parallel.tensor_parallel_size)
    layers = kv_sizing.LayerKv.of_decoder(decoder, shard)
    if drafts is not None:
        layers += kv_sizing.LayerKv.of_draft_layers(
            drafts.config, min(speculative.num_model_steps, drafts.num_layers), shard
        )
    on_disk = sum(file.stat().st_size for file in config.model.path.glob("*.safetensors"))
    packed = weight_bytes_per_step(decoder, QuantScheme.create(config.model.dtype, config.model.quantization))
    fmt = kv_sizing.KvCacheFormat.create(config)
    one_block = shard.size * kv_sizing.block_bytes(layers, fmt)
    taken = on_disk if packed is None else packed
    size = kv_sizing.choose_size(config, one_block, max_model_len, lambda: max(0, free() - taken))
    longest = min(max_model_len, size.num_tokens + 1)
    weights = f"{on_disk / 1e9:.2f} GB in files"
    if packed is not None:
        weights += f", {packed / 1e9:.2f} GB of linear layers as {config.model.quantization or config.model.dtype}"
    why = "" if longest == max_model_len else f" (the model's {max_model_len} do not fit into the KV cache)"
    on_gpu = "with main memory, as of device cpu; a GPU's memory is not asked for" if config.device != "cpu" else None
    return ({} if on_gpu is None else {"forecast": on_gpu}) | {
        "weights": weights,
        "KV cache": size.describe(longest),
        "longest request": f"{longest} tokens, prompt and output{why}",
        "drafting": f"up to {speculative.num_speculative_tokens} by {speculative.label}"
        if speculative.num_speculative_tokens
        else "none",
    }
