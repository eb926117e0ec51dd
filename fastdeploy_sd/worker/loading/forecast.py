"""Forecasts what a configuration needs, before anything is loaded: only headers and config.json are read.

Needs no Paddle. The size of the KV cache follows from the free memory of the host or the chosen GPU, so it is an
estimate unless it is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fastdeploy_sd.config import Config, cpu_only
from fastdeploy_sd.device.cuda.library import CudaLibrary, usable_library
from fastdeploy_sd.device.cuda.uploads import PIECE_BYTES
from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.models.adapted_linears import adapter_bytes
from fastdeploy_sd.models.checkpoint import Checkpoint, read_config
from fastdeploy_sd.models.decoder_config import DecoderConfig, MoeConfig
from fastdeploy_sd.models.drafters.draft_model import DraftWeights
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import embedding_bytes, expert_bytes, resident_bytes, weight_bytes_per_step
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard
from fastdeploy_sd.worker.kv import kv_sizing
from fastdeploy_sd.worker.kv.kv_layout import KvLayout
from fastdeploy_sd.worker.kv.state_sizing import state_size, verify_state_options
from fastdeploy_sd.worker.loading import gpu_memory
from fastdeploy_sd.worker.loading.draft_weights import draft_head_format, open_draft_weights, own_scheme, parts_of_rank
from fastdeploy_sd.worker.loading.engine_rows import host_rows, memory_rows, num_copies, processor_rows
from fastdeploy_sd.worker.loading.expert_rows import exchanged_bytes, expert_rows, most_expert_bytes
from fastdeploy_sd.worker.loading.free_memory import free_memory
from fastdeploy_sd.worker.ranks.expert_ranks import service_shape, slots_per_rank, verify_expert_parallel

_GIB = 1 << 30


def longest_sequence(config: Config) -> int:
    """Return the most tokens of a sequence, as the configuration and the checkpoint say.

    Raises:
        CheckpointError: the checkpoint is missing, malformed or of an unsupported architecture.
        ConfigError: the configuration asks for more than the checkpoint has.
    """
    return kv_sizing.max_model_len(config, _decoder_config(config))


def num_kv_groups(config: Config) -> int:
    """Return how many KV groups the checkpoint's layers are in; raises as longest_sequence."""
    layers = kv_sizing.LayerKv.of_decoder(_decoder_config(config))
    return len(KvLayout.of_model(layers, [], kv_sizing.KvCacheFormat.create(config), config).groups)


def _decoder_config(config: Config) -> DecoderConfig:
    path = config.model.path
    return read_decoder_config(read_config(path), str(path / "config.json"))


def forecast(config: Config, free: Callable[[], int] = free_memory) -> dict[str, str]:
    """Return name -> text of what `serve` would have: weights, KV cache, longest request and drafting.

    A usable GPU adds the use of its memory. If the configuration is for a GPU but none is usable, the first line says
    why main memory is forecast.

    Args:
        free: returns the bytes of main memory that this process may still take.

    Raises:
        CheckpointError: the checkpoint or its draft layers are missing, malformed or of an unsupported architecture.
        ConfigError: an option contradicts the checkpoint or the memory.
    """
    model = _Model.open(config)
    decoder, max_model_len, scheme = model.decoder, model.max_model_len, model.scheme
    verify_state_options(config, decoder)
    verify_expert_parallel(config, decoder)
    speculative, shard = config.speculative, Shard(0, config.parallel.tensor_parallel_size)
    rows, gpu = _device_rows(config)
    of_experts, exchanged = dict[str, str](), 0
    if config.parallel.expert_ranks > 1:
        exchanged = model.exchanged_bytes(gpu)
        of_experts = expert_rows(config, decoder, model.expert_bytes(), exchanged, on_gpu=gpu is not None)
    rows |= host_rows(config) | processor_rows(config, gpu)
    packed = model.packed_bytes(on_gpu=gpu is not None)
    target_kv = kv_sizing.LayerKv.of_decoder(decoder, shard)
    layout = KvLayout.of_model(target_kv, model.draft_layers(shard), kv_sizing.KvCacheFormat.create(config), config)
    one_block = shard.size * layout.block_bytes
    if gpu is None:
        count = config.parallel.engines_on_host
        whole, spread = model.main_memory()
        taken = model.taken()
        states = state_size(config, decoder, lambda: kv_sizing.half_of(free() - taken, count).num_bytes, shard.size)
        state_bytes = 0 if states is None else states.num_bytes
        size = kv_sizing.choose_size(
            config,
            one_block,
            max_model_len,
            lambda: kv_sizing.half_of(free() - taken, count, state_bytes),
            layout.groups,
        )
        rows |= memory_rows(
            config, whole + spread // config.parallel.engines_per_host, taken, size.num_bytes + state_bytes
        )
    else:
        memory = model.memory_with_weights(gpu, shard)
        share = config.cache.gpu_memory_utilization
        room = gpu_memory.room_for_kv(config, memory, memory.room(share), shard.size)
        states = state_size(config, decoder, lambda: room.num_bytes, shard.size)
        if states is not None:
            memory = replace(memory, free=memory.free - states.num_bytes // shard.size)
            room = gpu_memory.room_for_kv(config, memory, memory.room(share), shard.size)
        size = kv_sizing.choose_size(config, one_block, max_model_len, lambda: room, layout.groups)
        rows |= _gpu_rows(gpu, memory, exchanged, size, shard)
    longest = min(max_model_len, size.num_tokens + 1)
    weights = f"{model.on_disk / 1e9:.2f} GB in files"
    if packed is not None:
        are_integers = packed != weight_bytes_per_step(decoder, scheme)
        form = "the numbers of the file" if are_integers else config.model.quantization or config.model.dtype
        weights += f", {packed / 1e9:.2f} GB of linear layers as {form}"
    why = "" if longest == max_model_len else f" (the model's {max_model_len} do not fit into the KV cache)"
    return rows | {
        "weights": weights,
        **of_experts,
        **_adapter_rows(config, decoder, shard),
        "KV cache": size.describe(longest),
        **({} if states is None else {"recurrent states": states.describe()}),
        "longest request": f"{longest} tokens, prompt and output{why}",
        "drafting": f"up to {speculative.num_speculative_tokens} by {speculative.label}"
        if speculative.num_speculative_tokens
        else "none",
    }


def weights_in_memory(config: Config) -> int:
    """Return the bytes of main memory that all engines of a model take besides KV and states; raises as `forecast`."""
    return _Model.open(config).taken()


@dataclass(frozen=True, slots=True)
class _Model:
    """The parts of a checkpoint that decide memory; on_disk: bytes of its files."""

    config: Config
    decoder: DecoderConfig
    weights: DecoderWeights
    drafts: Mapping[str, DraftWeights]
    max_model_len: int
    on_disk: int

    @classmethod
    def open(cls, config: Config) -> Self:
        checkpoint = Checkpoint(config.model.path)
        decoder = read_decoder_config(checkpoint.config, str(checkpoint.config_path))
        max_model_len = kv_sizing.max_model_len(config, decoder)
        drafts = open_draft_weights(config, checkpoint, decoder)
        weights = DecoderWeights(checkpoint, decoder)
        return cls(config, decoder, weights, drafts, max_model_len, checkpoint.num_bytes())

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme.create(self.config.model.dtype, self.config.model.quantization)

    def packed_bytes(self, *, on_gpu: bool) -> int | None:
        """Return the bytes of the linear layers as kernels read them, None where that is not known."""
        return weight_bytes_per_step(self.decoder, self.scheme, self.stored_weights, on_gpu=on_gpu)

    def main_memory(self) -> tuple[int, int]:
        """Return the bytes of an engine's weights but for spread experts, and those of the latter of all engines."""
        packed, stored = self.packed_bytes(on_gpu=False), self.stored_weights
        weight_bytes = self.on_disk if packed is None else packed + (0 if stored is None else embedding_bytes(stored))
        spread = self._spread_bytes() // self.config.parallel.num_hosts
        if spread:
            weight_bytes = resident_bytes(self.decoder, self.scheme, WHOLE_MODEL, stored)
        return weight_bytes - spread + self.draft_bytes(WHOLE_MODEL), spread

    def expert_bytes(self) -> Sequence[tuple[MoeConfig, int]]:
        """Return the layers that have experts, and the bytes of one."""
        stored = self.stored_weights
        return [
            (moe, expert_bytes(self.decoder, self.scheme, moe, stored, i))
            for i, layer in enumerate(self.decoder.layers)
            if isinstance(moe := layer.mlp, MoeConfig)
        ]

    def exchanged_bytes(self, gpu: CudaLibrary | None) -> int:
        """Return the bytes in which ranks exchange rows; see there."""
        shape = service_shape(self.config, self.decoder, self.drafts)
        layers = dict.fromkeys(moe for moe, _ in self.expert_bytes())
        return exchanged_bytes(gpu, shape, self.decoder.hidden_size, self.scheme, layers)

    def _spread_bytes(self) -> int:
        """Return the bytes of the target's experts where all engines' ranks have one copy, 0 where each has all."""
        config, num_ranks = self.config, self.config.parallel.expert_ranks
        if num_ranks == 1:
            return 0

        def count(moe: MoeConfig) -> int:
            has_places = config.parallel.eplb is not None
            return num_ranks * slots_per_rank(config, moe.num_experts) if has_places else moe.num_experts

        return sum(count(moe) * num_bytes for moe, num_bytes in self.expert_bytes())

    def taken(self) -> int:
        """Return the bytes of main memory that all engines take of weights and adapters."""
        parallel, (whole, spread) = self.config.parallel, self.main_memory()
        num_ranks = parallel.tensor_parallel_size
        adapters = num_ranks * adapter_bytes(self.config, self.decoder, Shard(0, num_ranks))
        return num_copies(self.config) * whole + spread + parallel.engines_per_host * adapters

    @property
    def stored_weights(self) -> DecoderWeights | None:
        """The weights where integers of the checkpoint stay so."""
        return self.weights if self.config.model.keeps_integers else None

    def draft_layers(self, shard: Shard) -> list[kv_sizing.LayerKv]:
        layers, num_steps = list[kv_sizing.LayerKv](), self.config.speculative.num_model_steps
        for draft, part in parts_of_rank(self.config, self.drafts, shard).values():
            num_layers, reads_hidden = draft.num_kv_layers(num_steps), bool(draft.reads)
            per_draft = draft.num_kv_layers(1)
            layers += kv_sizing.LayerKv.of_draft_layers(
                draft.config, num_layers, part, reads_hidden=reads_hidden, per_draft=per_draft
            )
        return layers

    def draft_bytes(self, shard: Shard) -> int:
        """Return the bytes of a rank's weights of draft models."""
        config = self.config
        format_of_target = self.scheme.lm_head
        head = draft_head_format(config, format_of_target)
        own_head, num_steps = None if head == format_of_target else head, config.speculative.num_model_steps
        return sum(
            draft.num_bytes(own_scheme(config), num_steps, own_head, part)
            for draft, part in parts_of_rank(config, self.drafts, shard).values()
        )

    def memory_with_weights(self, gpu: CudaLibrary, shard: Shard) -> gpu_memory.GpuMemory:
        """Return a GPU's memory after a rank's weights are loaded."""
        config, total_and_free = self.config, gpu.memory_bytes()
        num_ranks = config.parallel.expert_ranks
        spread = None if num_ranks == 1 else Shard(num_ranks - 1, num_ranks)  # no other has more
        weights = resident_bytes(self.decoder, self.scheme, shard, self.stored_weights, spread)
        weights += self.draft_bytes(shard) + adapter_bytes(config, self.decoder, shard)
        if spread is not None:
            least = sum(-(-moe.num_experts // num_ranks) * num_bytes for moe, num_bytes in self.expert_bytes())
            weights += most_expert_bytes(config, self.expert_bytes()) - least + self.exchanged_bytes(gpu)
        steps = gpu_memory.step_bytes(config, self.decoder, list(self.drafts.values()), self.max_model_len, gpu)
        return gpu_memory.GpuMemory(total_and_free[0], total_and_free[1] - weights, steps)


def _adapter_rows(config: Config, decoder: DecoderConfig, shard: Shard) -> dict[str, str]:
    """Return the row about a rank's places for adapters; {} where there are none."""
    num_slots, num_bytes = config.lora.num_slots, adapter_bytes(config, decoder, shard)
    if num_slots == 0:
        return {}
    each = f" on each of {shard.size} ranks" if shard.size > 1 else ""
    places = f"{num_slots} places" if num_slots > 1 else "1 place"
    return {"LoRA adapters": f"{places} for adapters of rank {config.lora.max_rank}, {num_bytes / 1e9:.2f} GB{each}"}


def _device_rows(config: Config) -> tuple[dict[str, str], CudaLibrary | None]:
    """Return the rows about the device, and the chosen GPU."""
    if config.device == "cpu":
        return {}, None
    found, refusal = usable_library(config.parallel.first_rank), next(iter(cpu_only(config)), None)
    if isinstance(found, str):
        reason = found
    elif refusal is not None:
        reason = refusal.message
    else:
        try:
            found.memory_bytes()
        except (ValueError, DeviceLost) as error:  # others fill it: there is no room for a context
            reason = f"{found.device_name}: {error}"
        else:
            return {}, found
    return {"forecast": f"with main memory, as of device cpu: {reason}"}, None


def _gpu_rows(
    gpu: CudaLibrary, memory: gpu_memory.GpuMemory, exchanged: int, size: kv_sizing.KvCacheSize, shard: Shard
) -> dict[str, str]:
    _, free = gpu.memory_bytes()
    kv = size.num_blocks * size.block_bytes // shard.size
    each = f" on each of {shard.size}" if shard.size > 1 else ""
    parts = {"weights": free - memory.free - exchanged, "rows of experts": exchanged} if exchanged else {}
    parts |= {"weights": free - memory.free - exchanged, "steps": memory.steps, "KV": kv}
    parts["unused"] = memory.free - memory.steps - kv
    text = ", ".join(f"{num_bytes / _GIB:.2f} {name}" for name, num_bytes in parts.items())
    return {
        "GPU": gpu.text,
        "GPU memory": f"GiB{each}: {text}",
        "main memory": f"{2 * PIECE_BYTES >> 20} MiB of pinned memory while weights load, no copy of them",
    }
