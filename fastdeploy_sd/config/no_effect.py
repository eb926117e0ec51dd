"""Options of FastDeploy and vLLM that could not change anything here: any valid value is accepted, and the log says so.

Each describes a device, a process, a buffer or a choice that this server does not have, or belongs to a feature that is
refused by its own name as soon as it is switched on (unsupported.py). No token and no address depends on one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.config.maps import read_map
from fastdeploy_sd.config.option import Option, Spec

_MEMORY = "kv_cache_memory_gb bounds the KV cache, or on a GPU gpu_memory_utilization"
_BLOCKS = "a request gets KV blocks as it needs them"
_PORTS = "this server's processes talk over sockets in a private folder"
_GLOBAL = "it belongs to the scheduler_name global, which is not here"
_ONE_CONNECTION = "one connection reads and one writes, everything that is there at once"
_PARALLEL = "ranks exchange values in one way, as sums have one order"
_IMAGES = "there are no images"
_GRAPH = "it is about CUDA graphs; the forward pass is recorded and replayed unless enforce_eager is set"


# Values that mean an option's default here -> what that is. The log says so, too.
MEANS_DEFAULT: Mapping[tuple[str, str], str] = {("dtype", "auto"): "bfloat16, whatever type the checkpoint has"}


def _option(name: str, kind: type, reason: str, choices: tuple[str, ...] = (), **limits: Any) -> Option:
    read = functools.partial(read_map, name) if kind is dict else None
    spec = Spec(reason, secret="password" in name, read_map=read, **limits)
    return Option(name, "", field_name=name, kind=kind, is_optional=True, default=None, choices=choices, spec=spec)


def _options(kind: type, reason: str, *names: str) -> tuple[Option, ...]:
    return tuple(_option(name, kind, reason) for name in names)


# A port may be a number, and several ports a text with commas or a list. All are kept as text.
NO_EFFECT: Mapping[str, Option] = {
    opt.name: opt
    for opt in (
        _option("kv_cache_ratio", float, _MEMORY, minimum=0, maximum=1),
        *_options(int, _BLOCKS, "prealloc_dec_block_slot_num_threshold", "static_decode_blocks"),
        *_options(str, "it belongs to kvcache_storage_backend", "write_policy"),
        *_options(dict, _GRAPH, "graph_optimization_config"),
        *_options(int, "the server is ready when everything is loaded", "use_warmup"),
        *_options(
            int,
            "prompts share a step as they fit; long_prefill_token_threshold bounds the part of each",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        ),
        *_options(
            bool,
            "async_scheduling overlaps host and GPU; on a CPU steps run one after the other",
            "enable_overlap_schedule",
        ),
        *_options(float, _IMAGES, "max_encoder_cache", "max_processor_cache"),
        *_options(bool, _IMAGES, "disable_chunked_mm_input"),
        *_options(int, "it belongs to enable_chunked_moe", "chunked_moe_size"),
        *_options(
            bool,
            _PARALLEL,
            "disable_custom_all_reduce",
            "disable_sequence_parallel_moe",
            "enable_flashinfer_allreduce_fusion",
            "use_internode_ll_two_stage",
            "shutdown_comm_group_if_worker_idle",
        ),
        *_options(str, _PORTS, "cache_queue_port", "engine_worker_queue_port"),
        *_options(
            int,
            _GLOBAL,
            "scheduler_min_load_score",
            "scheduler_load_shards_num",
            "scheduler_release_load_expire_period",
        ),
        *_options(int, _ONE_CONNECTION, "scheduler_reader_parallel", "scheduler_writer_parallel"),
        # vLLM's
        _option("trust_remote_code", bool, "code of a checkpoint is never run; a model that needs its own is refused"),
        _option("enable_auto_tool_choice", bool, "tool_call_parser is auto by default"),
    )
}


def verify_value(name: str, value: object) -> None:
    """Check the value of an option of NO_EFFECT as far as its type goes.

    Raises ConfigError: it is none that FastDeploy would take.
    """
    opt = NO_EFFECT[name]
    if opt.spec.read_map is None:
        opt.convert(_joined(value) if opt.kind is str else value)
    elif value is not None:
        opt.spec.read_map(value)


def means_default(name: str, value: object) -> bool:
    """Return whether a value of an option is another program's word for its default here."""
    return isinstance(value, str) and (name, value) in MEANS_DEFAULT


def no_effect_notes(given: Mapping[str, object]) -> list[str]:
    """Return a line for the log per reason: the options (name -> value) that were given, and why they do nothing."""
    by_reason: dict[str, list[str]] = {}
    for name in filter(NO_EFFECT.__contains__, given):
        by_reason.setdefault(NO_EFFECT[name].spec.help, []).append(name)
    notes = [f"{', '.join(names)}: accepted without effect: {reason}" for reason, names in by_reason.items()]
    defaults = [item for item in given.items() if means_default(*item)]
    return notes + [f"{name}: {value} is {MEANS_DEFAULT[name, str(value)]}" for name, value in defaults]


def _joined(value: object) -> object:
    """A port as a number, and several as a list, in the form of the text that a command line has."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(item, int | str) for item in value):
        return ",".join(map(str, value))
    return value
