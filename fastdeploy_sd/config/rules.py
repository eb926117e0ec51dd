"""The rules between options, and between options and the device. Knows no origin of a value and no single limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from fastdeploy_sd.config.addresses import is_this_machine
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.quantization import formats_of
from fastdeploy_sd.config.sections import Config
from fastdeploy_sd.config.speculative import SPECULATIVE_OPTION
from fastdeploy_sd.config.splitwise_section import MAX_PORT
from fastdeploy_sd.errors import ConfigError

_GIB = 1 << 30
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule between options.

    Attributes:
        verify: raises ConfigError when it is broken.
        options: what it reads; the first is the one that the error is about.
    """

    verify: Callable[[Config], None]
    options: tuple[str, ...]


def verify_rules(config: Config) -> None:
    """Check the rules between options. Raises ConfigError with a text that names both for each that is broken."""
    faults = Faults()
    for rule in RULES:
        with faults.collecting():
            rule.verify(config)
    faults.raise_all()


def _verify_step_tokens(config: Config) -> None:
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if num_tokens < num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens: expected at least max_num_seqs ({num_seqs}), got {num_tokens}",
            param="max_num_batched_tokens",
        )


def _verify_drafts(config: Config) -> None:
    """A request that is alone must find room for its token and the drafts; many share a step."""
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    k, most = config.speculative.num_speculative_tokens, config.scheduler.rows_of_request(1) - 1
    if num_tokens >= num_seqs and k > most:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens: expected at most {most} (one request may run {most + 1} of"
            f" max_num_batched_tokens {num_tokens} with max_num_seqs {num_seqs}, of which one is no draft), got {k}",
            param="speculative_config",
        )


def _verify_draft_ranks(config: Config) -> None:
    size, own = config.parallel.tensor_parallel_size, config.speculative.draft_tensor_parallel_size
    if own not in (None, 1, size):
        raise ConfigError(
            f"speculative_config.draft_tensor_parallel_size: expected 1 or tensor_parallel_size ({size}), got {own}",
            param=SPECULATIVE_OPTION,
        )


def _verify_threshold(config: Config) -> None:
    threshold = config.scheduler.long_prefill_token_threshold
    if threshold > 0 and not config.scheduler.enable_chunked_prefill:
        raise ConfigError(
            f"long_prefill_token_threshold: expected 0 when enable_chunked_prefill is off, got {threshold}",
            param="long_prefill_token_threshold",
        )


def _verify_whole_prompts(config: Config) -> None:
    scheduler, max_model_len = config.scheduler, config.model.max_model_len
    if scheduler.enable_chunked_prefill or max_model_len is None:
        return
    if scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: expected at least max_model_len ({max_model_len}) when"
            f" enable_chunked_prefill is off, got {scheduler.max_num_batched_tokens}",
            param="max_num_batched_tokens",
        )


def _verify_cache_size(config: Config) -> None:
    cache, max_model_len = config.cache, config.model.max_model_len
    if max_model_len is None or cache.num_blocks is None:
        return
    if cache.num_blocks * cache.block_size < max_model_len:
        raise ConfigError(
            f"num_gpu_blocks_override: expected room for max_model_len ({max_model_len} tokens), got"
            f" {cache.num_blocks} blocks of {cache.block_size}",
            param="num_gpu_blocks_override",
        )


def _verify_cache_memory(config: Config) -> None:
    """Refuse a KV cache that no use of it could fit into main memory; a GPU has its own."""
    wanted = config.cache.kv_cache_memory_gb
    has_gpu = config.device == "auto" and any(map(os.path.exists, _GPU_DRIVERS))
    if wanted is None or config.device == "gpu" or has_gpu:
        return
    has = config.parallel.num_nodes * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    if wanted > has:
        raise ConfigError(
            f"kv_cache_memory_gb: expected at most {has:.1f}, the memory of this machine in GiB, got {wanted:g}",
            param="kv_cache_memory_gb",
        )


def _verify_swap(config: Config) -> None:
    cache = config.cache
    if cache.swap_bytes and not cache.enable_prefix_caching:
        raise ConfigError(
            f"swap_space: expected none when enable_prefix_caching is off, got {cache.swap_space:g}", param="swap_space"
        )
    if cache.swap_folder is not None and not cache.swap_bytes:
        raise ConfigError(
            f"swap_folder: expected none without swap_space, got {cache.swap_folder!r}", param="swap_folder"
        )


def _verify_adapters(config: Config) -> None:
    lora = config.lora
    if lora.lora_modules and not lora.is_enabled:
        raise ConfigError(
            f"lora_modules: expected none with enable_lora false, got {len(lora.lora_modules)}", param="lora_modules"
        )
    for name, _ in lora.modules:
        if name in config.model.served_names:
            text = f"lora_modules: expected names that the model does not have, got {name!r}"
            raise ConfigError(text, param="lora_modules")


def _verify_adapters_enabled(name: str, config: Config) -> None:
    if not config.lora.is_enabled and (got := getattr(config.lora, name)) is not None:
        raise ConfigError(f"{name}: expected none without enable_lora or lora_modules, got {got}", param=name)


def _verify_nodes(config: Config) -> None:
    parallel, num_hosts = config.parallel, config.parallel.num_hosts
    name = "tensor_parallel_size" if parallel.data_parallel_size == 1 else "data_parallel_size"
    if (size := getattr(parallel, name)) % num_hosts:
        raise ConfigError(f"ips: expected as many as divide {name} ({size}), got {num_hosts}", param="ips")
    if num_hosts == 1:
        return
    if not parallel.is_local and config.splitwise.pd_secret is None:
        raise ConfigError("ips: expected loopback addresses when pd_secret is not set, got others", param="ips")
    if config.copies_kv and parallel.num_nodes > 1:
        raise ConfigError(
            "ips: expected none with swap_space or splitwise_role prefill or decode, as KV is copied on one host only"
            " yet",
            param="ips",
        )


def _verify_expert_ports(config: Config) -> None:
    last = max((port for _, port in config.parallel.expert_places), default=0)
    if len(config.parallel.expert_places) > 1 and last > MAX_PORT:
        most = MAX_PORT - (last - config.parallel.node_port)
        text = (
            f"node_port: expected at most {most}, as experts take the ports above it, got {config.parallel.node_port}"
        )
        raise ConfigError(text, param="node_port")


def _verify_ports(config: Config) -> None:
    """Each engine has its own ports between instances."""
    num_engines = config.parallel.data_parallel_size
    for name, most in (("pd_comm_port", num_engines), ("rdma_comm_ports", None)):
        ports: tuple[int, ...] = getattr(config.splitwise, name)
        few = most is not None and len(ports) > most
        if few or (len(ports) > 1 and len(ports) % num_engines):
            wanted = "one port" if num_engines == 1 else f"one port, or {'' if most else 'a multiple of '}{num_engines}"
            raise ConfigError(
                f"{name}: expected {wanted} for data_parallel_size {num_engines}, got {len(ports)}", param=name
            )
        if len(ports) == 1 and ports[0] + num_engines - 1 > MAX_PORT:
            raise ConfigError(
                f"{name}: expected at most {MAX_PORT - num_engines + 1}, as {num_engines} engines take as many in a"
                f" row, got {ports[0]}",
                param=name,
            )


def _verify_router_secret(config: Config) -> None:
    """The secret of this machine's user is worth nothing elsewhere."""
    if config.splitwise.pd_secret is not None:
        return
    for router in config.server.router:
        host = router.rpartition(":")[0].strip("[]")
        if not is_this_machine(host):
            raise ConfigError(
                f"router: expected one on this machine when pd_secret is not set, got {router}", param="router"
            )


def cpu_only(config: Config) -> Iterator[ConfigError]:
    """Yield an error for every option with a value that only the CPU can serve."""
    if config.parallel.num_hosts > 1:
        yield _error("ips", "one host", ",".join(config.parallel.ips))
    if config.model.enforce_eager:
        yield _error("enforce_eager", "false", "true")


def gpu_only(config: Config) -> Iterator[ConfigError]:
    """Yield an error for every option with a value that only a GPU can serve."""
    if formats_of(config.model.quantization).has("fp8"):
        yield _needs_gpu("quantization", "wint8, wint4 or none")
    if config.cache.kv_cache_dtype == "fp8":
        yield _needs_gpu("kv_cache_dtype", "auto or int8")
    if config.model.dtype == "float16":
        yield _needs_gpu("dtype", "bfloat16 or float32", "float16")


def _verify_device(config: Config) -> None:
    """Refuse what a GPU that was asked for cannot do yet. Raises ConfigError that names every such option."""
    if config.device == "gpu":
        _raise_all(cpu_only(config))


def _verify_processor(config: Config) -> None:
    """Refuse what a CPU that was asked for cannot do. Raises ConfigError that names every such option."""
    if config.device == "cpu":
        _raise_all(gpu_only(config))


def _raise_all(errors: Iterator[ConfigError]) -> None:
    faults = Faults()
    for error in errors:
        faults.add(error)
    faults.raise_all()


def _needs_gpu(option: str, expected: str, got: str = "fp8") -> ConfigError:
    return ConfigError(f"{option}: expected {expected} on a CPU, got {got}, which needs device gpu", param=option)


def _error(option: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"{option}: expected {expected} with device gpu, which can do no other yet, got {got}", param=option
    )


_STEP = "max_num_batched_tokens"
RULES = (
    Rule(_verify_step_tokens, (_STEP, "max_num_seqs")),
    Rule(_verify_drafts, (SPECULATIVE_OPTION, _STEP, "max_num_seqs")),
    Rule(_verify_draft_ranks, (SPECULATIVE_OPTION, "tensor_parallel_size")),
    Rule(_verify_threshold, ("long_prefill_token_threshold", "enable_chunked_prefill")),
    Rule(_verify_whole_prompts, (_STEP, "enable_chunked_prefill", "max_model_len")),
    Rule(_verify_cache_memory, ("kv_cache_memory_gb", "device", "ips")),
    Rule(_verify_swap, ("swap_space", "swap_folder", "enable_prefix_caching")),
    Rule(
        _verify_nodes,
        ("ips", "tensor_parallel_size", "data_parallel_size", "pd_secret", "swap_space", "splitwise_role"),
    ),
    Rule(_verify_adapters, ("lora_modules", "enable_lora", "served_model_name", "model")),
    *(
        Rule(partial(_verify_adapters_enabled, name), (name, "enable_lora", "lora_modules"))
        for name in ("max_loras", "max_lora_rank", "lora_root")
    ),
    Rule(_verify_expert_ports, ("enable_expert_parallel", "ips", "local_data_parallel_id", "node_port")),
    Rule(_verify_ports, ("pd_comm_port", "rdma_comm_ports", "data_parallel_size")),
    Rule(_verify_router_secret, ("router", "pd_secret")),
    Rule(_verify_device, ("device", "ips", "enforce_eager")),
    Rule(_verify_processor, ("device", "quantization", "kv_cache_dtype", "dtype")),
    Rule(_verify_cache_size, ("num_gpu_blocks_override", "max_model_len", "block_size")),
)
