"""FastDeploy options this version knows but does not implement.

Such an option is accepted only with a value that asks for nothing we lack (a configuration written for FastDeploy then
works unchanged); any other value is an error that says "not supported yet" and not "unknown".
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fastdeploy_sd.errors import suggest

_GRAPH_OPTION = "graph_optimization_config"

# Name -> the accepted values; () = none is, because any value asks for something that would not happen.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # model
    "revision": ("master",),
    "model_config_name": ("config.json",),
    "tokenizer_base_url": (None,),
    "task": ("generate",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "override_pooler_config": (None,),
    "use_warmup": (0,),
    "limit_mm_per_prompt": (None,),
    "mm_processor_kwargs": (None,),
    "max_encoder_cache": (),
    "max_processor_cache": (),
    "enable_mm": (False,),
    "enable_mm_output": (False,),
    "reasoning_parser": (None,),
    "chat_template": (None,),
    "tool_call_parser": (None,),
    "tool_parser_plugin": (None,),
    "dynamic_load_weight": (False,),
    "load_strategy": ("normal",),
    "load_choices": ("default", "default_v1"),
    "rsync_config": (None,),
    "device": ("cpu",),
    _GRAPH_OPTION: (None,),
    "plas_attention_config": (None,),
    "guided_decoding_backend": ("off",),
    "guided_decoding_disable_any_whitespace": (False,),
    "enable_logprob": (True,),
    "enable_keep_sampling_mask": (False,),
    "max_logprobs": (20,),
    "logprobs_mode": ("raw_logprobs",),
    "enable_early_stop": (False,),
    "early_stop_config": (None,),
    "lm_head_fp32": (False,),
    "logits_processors": (None,),
    "enable_entropy": (False,),
    "model_impl": ("auto", "fastdeploy"),
    # parallel
    "tensor_parallel_size": (1,),
    "data_parallel_size": (1,),
    "local_data_parallel_id": (0,),
    "enable_expert_parallel": (False,),
    "enable_eplb": (False,),
    "eplb_config": (None,),
    "routing_replay_config": (None,),
    "enable_chunked_moe": (False,),
    "chunked_moe_size": (),
    "disable_custom_all_reduce": (),
    "enable_flashinfer_allreduce_fusion": (False,),
    "use_internode_ll_two_stage": (False,),
    "disable_sequence_parallel_moe": (),
    "shutdown_comm_group_if_worker_idle": (),
    "ips": (None,),
    # cache
    "gpu_memory_utilization": (),
    "kv_cache_ratio": (),
    "swap_space": (None, 0),
    "prealloc_dec_block_slot_num_threshold": (),
    "static_decode_blocks": (),
    "kvcache_storage_backend": (None,),
    "write_policy": (),
    "enable_output_caching": (True,),
    # scheduling
    "max_num_partial_prefills": (1,),
    "max_long_partial_prefills": (1,),
    "disable_chunked_mm_input": (False,),
    "enable_overlap_schedule": (False,),
    "scheduler_name": ("local",),
    "scheduler_max_size": (-1,),
    "scheduler_ttl": (),
    "scheduler_host": (),
    "scheduler_port": (),
    "scheduler_db": (),
    "scheduler_password": (),
    "scheduler_topic": (),
    "scheduler_min_load_score": (),
    "scheduler_load_shards_num": (),
    "scheduler_sync_period": (),
    "scheduler_expire_period": (),
    "scheduler_release_load_expire_period": (),
    "scheduler_reader_parallel": (),
    "scheduler_writer_parallel": (),
    "scheduler_reader_batch_size": (),
    "scheduler_writer_batch_size": (),
    # prefill and decode on different instances
    "splitwise_role": ("mixed",),
    "innode_prefill_ports": (None,),
    "cache_queue_port": (None,),
    "engine_worker_queue_port": (None,),
    "cache_transfer_protocol": (),
    "pd_comm_port": (None,),
    "rdma_comm_ports": (None,),
    "router": (None,),
    # server
    "metrics_port": (None,),
    "controller_port": (-1,),
    "max_waiting_time": (-1,),
    "timeout": (),
}

# What to use in place of an option, where there is something.
INSTEAD: Mapping[str, str] = {
    "gpu_memory_utilization": "use kv_cache_memory_gb, an absolute size, for the KV cache on a CPU",
    "kv_cache_ratio": "prompts and outputs share all blocks; use kv_cache_memory_gb for their total",
    _GRAPH_OPTION: "the forward pass is recorded and replayed unless enforce_eager is set",
    "kv_cache_quant_type": "use kv_cache_dtype: int8",
    "metrics_port": "metrics are at /metrics on the server's port",
    "enable_logprob": "log-probabilities are always available to requests that ask",
    "max_waiting_time": "use max_num_queued_requests to bound the queue",
    "timeout": "use timeout_graceful_shutdown for the time after SIGTERM",
}

# Keys of speculative_config; as above. Most are FastDeploy's own, which users do not set.
UNSUPPORTED_SPECULATIVE: Mapping[str, tuple[object, ...]] = {
    "num_gpu_block_expand_ratio": (1, 1.0),
    "enf_gen_phase_tag": (False,),
    "model_type": ("main",),
    "sharing_model": (None,),
    "num_extra_cache_layer": (0,),
}

# Keys of quantization's map; as above.
UNSUPPORTED_QUANTIZATION: Mapping[str, tuple[object, ...]] = {
    "kv_cache_quant_type": (None,),
    "image_moe_quant_type": (None,),
    "is_channel_wise": (False,),
    "has_zero_point": (False,),
    "is_permuted": (True,),
    "is_quantized": (False,),
    "is_moe_quantized": (False,),
    "hadamard_block_size": (128,),
}

# Keys of graph_optimization_config; as above. They ask for what recording the forward pass does anyway.
UNSUPPORTED_GRAPH: Mapping[str, tuple[object, ...]] = {
    "use_cudagraph": (True,),
    "draft_model_use_cudagraph": (True,),
}


def rejection(name: str, value: object, accepted: tuple[object, ...]) -> str | None:
    """Return why `value` of a not yet supported option cannot be accepted, or None when it asks for nothing."""
    text = str(value).strip().lower()
    if any(text == str(a).lower() for a in accepted):
        return None
    if name == _GRAPH_OPTION:
        return _graph_rejection(value)
    only = f" (only {' or '.join(str(a).lower() for a in accepted)} is)" if accepted else ""
    instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    return f"{name}: {value!r} is not supported yet in this version{only}{instead}"


def _graph_rejection(value: object) -> str | None:
    """As `rejection`, of a map or its JSON text, key by key."""
    pairs = _read_pairs(value)
    instead = INSTEAD[_GRAPH_OPTION]
    if pairs is None:
        return f"{_GRAPH_OPTION}: expected a map or a JSON object, got {value!r}; {instead}"
    for written, item in pairs:
        key = str(written).replace("-", "_")
        accepted = UNSUPPORTED_GRAPH.get(key, ())
        reason = rejection(f"{_GRAPH_OPTION}.{key}", item, accepted)
        if reason is not None:
            return f"{reason}{'' if accepted else suggest(key, UNSUPPORTED_GRAPH)}; {instead}"
    return None


def _read_pairs(value: object) -> tuple[tuple[object, object], ...] | None:
    """Return the keys and values of a map or a JSON object, repeated ones too; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=tuple)  # an array is a list, so a tuple is an object
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, tuple) else None
    return tuple(value.items()) if isinstance(value, Mapping) else None
