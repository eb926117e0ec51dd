"""FastDeploy's options for which this version has nothing: refused by name, unless the value asks for nothing.

A configuration written for FastDeploy then works unchanged where it can, and any other value is an error that says
"not supported yet" and not "unknown". Options that could not change anything here are in no_effect.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastdeploy_sd.errors import shown

# Name -> the accepted values; () = none is, because any value asks for something that would not happen.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # model
    "model_config_name": ("config.json",),
    "tokenizer_base_url": (None,),
    "task": ("generate",),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "override_pooler_config": (None,),
    "limit_mm_per_prompt": (None,),
    "mm_processor_kwargs": (None,),
    "enable_mm": (False,),
    "enable_mm_output": (False,),
    "tool_parser_plugin": (None,),
    "dynamic_load_weight": (False,),
    "load_strategy": ("normal",),
    "load_choices": ("default", "default_v1"),
    "rsync_config": (None,),
    "plas_attention_config": (None,),
    "guided_decoding_backend": ("off", "auto", "guidance"),
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
    "routing_replay_config": (None,),
    "enable_chunked_moe": (False,),
    # cache
    "kvcache_storage_backend": (None,),
    "enable_output_caching": (True,),
    # scheduling
    "scheduler_max_size": (-1,),
    # prefill and decode on different instances
    "innode_prefill_ports": (None,),
    # server
    "controller_port": (-1,),
    "max_waiting_time": (-1,),
    "timeout": (),
}

# What to use in place of an option, where there is something.
INSTEAD: Mapping[str, str] = {
    "kv_cache_quant_type": "use kv_cache_dtype: int8 or fp8",
    "enable_logprob": "log-probabilities are always available to requests that ask",
    "scheduler_max_size": "use max_num_queued_requests to bound the queue",
    "max_waiting_time": "use max_num_queued_requests to bound the queue",
    "timeout": "use timeout_graceful_shutdown for the time after SIGTERM",
    "window_size": "use redundant_expert_dump_workload_interval, in seconds",
    "step_interval": "use redundant_expert_dump_workload_interval, in seconds",
    "log_balancedness": "the metric fastdeploy_sd:expert_balancedness tells it",
}

# Keys of speculative_config; as above. Most are FastDeploy's own, which users do not set.
UNSUPPORTED_SPECULATIVE: Mapping[str, tuple[object, ...]] = {
    "num_gpu_block_expand_ratio": (1, 1.0),
    "enf_gen_phase_tag": (False,),
    "model_type": ("main",),
    "sharing_model": (None,),
    "num_extra_cache_layer": (0,),
    # vLLM's
    "disable_by_batch_size": (None,),
    "parallel_drafting": (False,),
}

# Keys of eplb_config; as above.
UNSUPPORTED_EPLB: Mapping[str, tuple[object, ...]] = {
    "redundant_expert_eplb_strategy": ("",),
    # vLLM's
    "window_size": (),
    "step_interval": (),
    "log_balancedness": (False,),
    "use_async": (True,),
    "policy": ("default",),
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


def rejection(name: str, value: object, accepted: tuple[object, ...]) -> str | None:
    """Return why `value` of a not yet supported option cannot be accepted, or None when it asks for nothing."""
    text = str(value).strip().lower()
    if any(text == str(a).lower() for a in accepted):
        return None
    only = f" (only {' or '.join(str(a).lower() for a in accepted)} is)" if accepted else ""
    instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    return f"{name}: {shown(value)} is not supported yet in this version{only}{instead}"
