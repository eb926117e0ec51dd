"""The frozen configuration values, grouped by who reads them. Each field is declared once, with its text and limits.

A section checks its own fields when constructed; rules between fields are in rules.py, so that tests may construct
unusual combinations on purpose. Knows no YAML, no command line and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.config.model_section import ModelConfig
from fastdeploy_sd.config.option import Spec, option, verify_fields
from fastdeploy_sd.config.parallel_section import ParallelConfig
from fastdeploy_sd.config.redis_section import RedisConfig
from fastdeploy_sd.config.scheduler_section import SchedulerConfig
from fastdeploy_sd.config.server_section import ServerConfig
from fastdeploy_sd.config.speculative import SpeculativeConfig
from fastdeploy_sd.config.splitwise_section import SplitwiseConfig


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(64, Spec("Tokens per KV block.", choices=(16, 32, 64, 128, 256)))
    num_blocks: int | None = option(
        None,
        Spec(
            "KV blocks of an engine; none: as `kv_cache_memory_gb` allows.",
            name="num_gpu_blocks_override",
            aliases=("num_blocks_override",),
            minimum=1,
        ),
    )
    kv_cache_memory_gb: float | None = option(
        None,
        Spec(
            "Memory for KV blocks, in GiB, of an engine's ranks together, at most what the machine has; none: what"
            " `max_num_seqs` requests of full length need, at most an engine's part of half of what is free when the"
            " weights are loaded; on a GPU what `gpu_memory_utilization` leaves.",
            minimum=0.001,
        ),
    )
    gpu_memory_utilization: float = option(
        0.9,
        Spec(
            "Share of a GPU's memory that may be in use once the server has its weights, its KV blocks and room for its"
            " steps; KV blocks take what is left of it. Without effect on a CPU.",
            minimum=0.01,
            maximum=1,
        ),
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = option(
        "auto",
        Spec(
            "How keys and values are stored: auto is `dtype`; int8 and, on a GPU only, fp8 (e4m3) have one scale per"
            " token and KV head, and about half the bytes of bfloat16. Draft layers alike."
        ),
    )
    enable_prefix_caching: bool = option(True, Spec("Reuse the KV blocks of prompts that start alike."))
    num_state_snapshots: int | None = option(
        None,
        Spec(
            "Of models with recurrent states: copies of states that prompts may go on from, besides their KV blocks. A"
            " prompt reuses tokens up to one of them only. none: four for each of `max_num_seqs` requests, at most a"
            " quarter of the memory that KV blocks could take.",
            minimum=0,
        ),
    )
    swap_space: float | None = option(
        None,
        Spec(
            "Second level of an engine's prefix cache, in GiB: copies of KV blocks that outlive these. Worth having if"
            " it is larger than the KV cache. none or 0: there is none.",
            minimum=0,
        ),
    )
    swap_folder: str | None = option(
        None,
        Spec(
            "Folder for the file of `swap_space`, which the next start of the same model goes on with; none: it is"
            " memory, and ends with the server."
        ),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "cache")

    @property
    def swap_bytes(self) -> int:
        """Bytes of the second level, 0 = there is none."""
        return int((self.swap_space or 0) * (1 << 30))


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a server or an offline LLM is configured with.

    Attributes:
        num_threads: threads of the kernels.
        device: where the model runs.
        origins: option name -> where its value came from; options that are absent have their default.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    splitwise: SplitwiseConfig = field(default_factory=SplitwiseConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    num_threads: int | None = option(
        None,
        Spec(
            "Threads of the kernels, of each rank; none: one per core this process may run on, hyperthreads of a core"
            " counting once, and no more than the whole processors of its control group's quota, shared out among the"
            " ranks.",
            minimum=1,
            maximum=1024,
        ),
    )
    device: Literal["auto", "cpu", "gpu"] = option(
        "cpu",
        Spec(
            "Where the model runs. gpu: on the first NVIDIA GPU; the first start builds its kernels, see docs/gpu.md."
            " auto: on a GPU where there are a driver, a GPU and kernels or a compiler for it, and no other option"
            " needs the CPU, else cpu."
        ),
    )
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        verify_fields(self, "")

    @property
    def copies_kv(self) -> bool:
        """Whether KV is copied out of the cache and into it: to other instances or to a second level."""
        return self.splitwise.splitwise_role != "mixed" or self.cache.swap_bytes > 0

    @property
    def engine_timeout_s(self) -> float:
        """Seconds without a sign of life after which an engine hangs.

        Ranks have time to tell which one does; and one may wait for the experts of another command's engine.
        """
        parallel = self.parallel
        of_ranks_s = 2 * parallel.rank_timeout_s if parallel.tensor_parallel_size > 1 else 0.0
        waits = parallel.shares_experts and len(parallel.expert_places) > 1
        return max(self.server.engine_timeout_s, of_ranks_s) + parallel.node_timeout_s * waits


def drafter_advice(config: Config, method: str) -> str:
    """Return what to do about a drafter of this method, whose drafts are wrong."""
    folder = config.speculative.model
    return (
        f"fewer than one in 20 drafts of {method} is right: {folder} may be read otherwise than it was trained;"
        f" `fastdeploy-sd drafter check {folder} --model {config.model.served_name}` tries other readings"
    )
