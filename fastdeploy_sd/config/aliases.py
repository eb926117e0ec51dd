"""Options' names in vLLM, SGLang and llama.cpp: taken where they mean the same, else refused with the name to use.

docs/migration.md shows both tables. Knows the names of our options, not their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option of another program.

    Attributes:
        program: whose it is.
        here: what to use in its place, or what takes care of it.
    """

    program: str
    here: str


# Name -> (whose it is, our option that means the same).
SAME_MEANING: Mapping[str, ForeignOption] = {
    "tp": ForeignOption(VLLM, "tensor_parallel_size"),
    "dp": ForeignOption(VLLM, "data_parallel_size"),
    "q": ForeignOption(VLLM, "quantization"),
    "api_server_count": ForeignOption(VLLM, "workers"),
    "model_path": ForeignOption(SGLANG, "model"),
    "tokenizer_path": ForeignOption(SGLANG, "tokenizer"),
    "tp_size": ForeignOption(SGLANG, "tensor_parallel_size"),
    "context_length": ForeignOption(SGLANG, "max_model_len"),
    "max_running_requests": ForeignOption(SGLANG, "max_num_seqs"),
    "m": ForeignOption(LLAMA_CPP, "model"),
    "t": ForeignOption(LLAMA_CPP, "num_threads"),
    "threads": ForeignOption(LLAMA_CPP, "num_threads"),
    "np": ForeignOption(LLAMA_CPP, "max_num_seqs"),
    "parallel": ForeignOption(LLAMA_CPP, "max_num_seqs"),
    "alias": ForeignOption(LLAMA_CPP, "served_model_name"),
}

_RANKS = "tensor_parallel_size, and ips for several hosts"
_ALL_LAYERS = "device: all layers are on a GPU, or none"
_ALWAYS = "nothing: it is always so"
_METHOD = "speculative_config.method"
_DRAFTS = "speculative_config.num_speculative_tokens"
_CONTEXT = "max_model_len for one request, kv_cache_memory_gb for the cache of all"
_KV_DTYPE = "kv_cache_dtype"
_STEP = "max_num_batched_tokens"
_DRAFT_MODEL = "speculative_config.model, with method draft_model"
_HUB = "model: a name, as ORG/NAME:Q8_0"
_EXCHANGE = "nothing: ranks of one host exchange rows in memory, those of several over encrypted sockets"
_TLS = "a proxy in front"
_IN_REQUESTS = "a field of the request"

_MODELS = "models, of the command line or a YAML file"
# Name -> what a user of it is told. None of these is accepted.
OTHER_MEANING: Mapping[str, ForeignOption] = {
    "pipeline_parallel_size": ForeignOption(VLLM, _RANKS),
    "pp": ForeignOption(VLLM, _RANKS),
    "distributed_executor_backend": ForeignOption(VLLM, _RANKS),
    "kv_cache_memory_bytes": ForeignOption(VLLM, "kv_cache_memory_gb"),
    "cpu_offload_gb": ForeignOption(VLLM, "nothing: the weights lie in the memory of the one device that device names"),
    "load_format": ForeignOption(VLLM, "nothing: weights are read from safetensors files"),
    "compilation_config": ForeignOption(VLLM, "enforce_eager"),
    "max_cpu_loras": ForeignOption(VLLM, "nothing: an adapter that gets a place is read from its folder"),
    "lora_dtype": ForeignOption(VLLM, "nothing: adapters have the model's dtype"),
    "fully_sharded_loras": ForeignOption(VLLM, "nothing: each rank has its part of an adapter"),
    "kv_transfer_config": ForeignOption(VLLM, "splitwise_role, and router before the instances"),
    "enable_sleep_mode": ForeignOption(VLLM, "nothing: stop the server to free its memory"),
    "default_chat_template_kwargs": ForeignOption(VLLM, "chat_template_kwargs, a field of the request"),
    "no_enable_log_requests": ForeignOption(VLLM, "nothing: the text of requests is never logged"),
    "disable_log_requests": ForeignOption(VLLM, "nothing: the text of requests is never logged"),
    "expert_placement_strategy": ForeignOption(VLLM, "nothing: ranks have consecutive experts"),
    "all2all_backend": ForeignOption(VLLM, _EXCHANGE),
    "ssl_keyfile": ForeignOption(VLLM, _TLS),
    "ssl_certfile": ForeignOption(VLLM, _TLS),
    "mem_fraction_static": ForeignOption(SGLANG, "kv_cache_memory_gb"),
    "chunked_prefill_size": ForeignOption(SGLANG, _STEP),
    "ep_size": ForeignOption(SGLANG, "enable_expert_parallel, over all ranks"),
    "enable_dp_attention": ForeignOption(SGLANG, "data_parallel_size: engines; enable_expert_parallel shares experts"),
    "moe_a2a_backend": ForeignOption(SGLANG, _EXCHANGE),
    "speculative_algorithm": ForeignOption(SGLANG, _METHOD),
    "speculative_num_draft_tokens": ForeignOption(SGLANG, _DRAFTS),
    "speculative_num_steps": ForeignOption(SGLANG, "speculative_config.num_model_steps"),
    "speculative_eagle_topk": ForeignOption(SGLANG, "speculative_config.draft_top_k, with draft_trees"),
    "speculative_draft_model_path": ForeignOption(SGLANG, "speculative_config.model, of MTP weights or a draft model"),
    "c": ForeignOption(LLAMA_CPP, _CONTEXT),
    "ctx_size": ForeignOption(LLAMA_CPP, _CONTEXT),
    "b": ForeignOption(LLAMA_CPP, _STEP),
    "batch_size": ForeignOption(LLAMA_CPP, _STEP),
    "ub": ForeignOption(LLAMA_CPP, _STEP),
    "ubatch_size": ForeignOption(LLAMA_CPP, _STEP),
    "ngl": ForeignOption(LLAMA_CPP, _ALL_LAYERS),
    "n_gpu_layers": ForeignOption(LLAMA_CPP, _ALL_LAYERS),
    "ctk": ForeignOption(LLAMA_CPP, _KV_DTYPE),
    "ctv": ForeignOption(LLAMA_CPP, _KV_DTYPE),
    "cache_type_k": ForeignOption(LLAMA_CPP, _KV_DTYPE),
    "cache_type_v": ForeignOption(LLAMA_CPP, _KV_DTYPE),
    "fa": ForeignOption(LLAMA_CPP, _ALWAYS),
    "flash_attn": ForeignOption(LLAMA_CPP, _ALWAYS),
    "cb": ForeignOption(LLAMA_CPP, _ALWAYS),
    "cont_batching": ForeignOption(LLAMA_CPP, _ALWAYS),
    "jinja": ForeignOption(LLAMA_CPP, _ALWAYS),
    "metrics": ForeignOption(LLAMA_CPP, _ALWAYS),
    "hf": ForeignOption(LLAMA_CPP, _HUB),
    "hf_repo": ForeignOption(LLAMA_CPP, _HUB),
    "md": ForeignOption(LLAMA_CPP, _DRAFT_MODEL),
    "model_draft": ForeignOption(LLAMA_CPP, _DRAFT_MODEL),
    "draft": ForeignOption(LLAMA_CPP, _DRAFTS),
    "draft_max": ForeignOption(LLAMA_CPP, _DRAFTS),
    "spec_draft_n_max": ForeignOption(LLAMA_CPP, _DRAFTS),
    "spec_type": ForeignOption(LLAMA_CPP, _METHOD),
    "n_predict": ForeignOption(LLAMA_CPP, _IN_REQUESTS),
    "temp": ForeignOption(LLAMA_CPP, _IN_REQUESTS),
    "top_k": ForeignOption(LLAMA_CPP, _IN_REQUESTS),
    "top_p": ForeignOption(LLAMA_CPP, _IN_REQUESTS),
    "models_preset": ForeignOption(LLAMA_CPP, _MODELS),
    "models_dir": ForeignOption(LLAMA_CPP, _MODELS),
    "models_max": ForeignOption(LLAMA_CPP, "nothing: all of models are loaded at the start"),
    "threads_http": ForeignOption(LLAMA_CPP, "workers, which are processes"),
}


def advice(name: str) -> str:
    """Return " (vLLM's; use ... here)" for an option of another program, or ""."""
    foreign = OTHER_MEANING.get(name)
    return f" (of {foreign.program}; here: {foreign.here})" if foreign else ""
