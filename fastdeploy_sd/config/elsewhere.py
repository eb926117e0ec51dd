"""Options' names in vLLM, SGLang and llama.cpp: taken where they mean the same, else refused with the name to use.

docs/migration.md shows both tables. Knows the names of our options, not their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option of another program.

    Attributes:
        program: whose it is.
        here: what to use in its place, or what takes care of it.
    """

    program: str
    here: str


# Name -> (whose it is, our option that means the same).
SAME_MEANING: Mapping[str, Foreign] = {
    "tp": Foreign(VLLM, "tensor_parallel_size"),
    "dp": Foreign(VLLM, "data_parallel_size"),
    "q": Foreign(VLLM, "quantization"),
    "api_server_count": Foreign(VLLM, "workers"),
    "model_path": Foreign(SGLANG, "model"),
    "tokenizer_path": Foreign(SGLANG, "tokenizer"),
    "tp_size": Foreign(SGLANG, "tensor_parallel_size"),
    "context_length": Foreign(SGLANG, "max_model_len"),
    "max_running_requests": Foreign(SGLANG, "max_num_seqs"),
    "m": Foreign(LLAMA_CPP, "model"),
    "t": Foreign(LLAMA_CPP, "num_threads"),
    "threads": Foreign(LLAMA_CPP, "num_threads"),
    "np": Foreign(LLAMA_CPP, "max_num_seqs"),
    "parallel": Foreign(LLAMA_CPP, "max_num_seqs"),
    "alias": Foreign(LLAMA_CPP, "served_model_name"),
}

_RANKS = "tensor_parallel_size, and ips for several hosts"
_ALL_LAYERS = "device: all layers are on a GPU, or none"
_ALWAYS = "nothing: it is always so"
_METHOD = "speculative_config.method"
_DRAFTS = "speculative_config.num_speculative_tokens"
_CONTEXT = "max_model_len for one request, kv_cache_memory_gb for the cache of all"
_KV_DTYPE = "kv_cache_dtype"
_STEP = "max_num_batched_tokens"
_DRAFT_MODEL = "nothing yet: separate draft models are not supported"
_HUB = "model: a name, of a repository with safetensors files"
_TLS = "a proxy in front"
_IN_REQUESTS = "a field of the request"
_ADAPTERS = "nothing yet: adapters are not supported"

# Name -> what a user of it is told. None of these is accepted.
OTHER_MEANING: Mapping[str, Foreign] = {
    "pipeline_parallel_size": Foreign(VLLM, _RANKS),
    "pp": Foreign(VLLM, _RANKS),
    "distributed_executor_backend": Foreign(VLLM, _RANKS),
    "kv_cache_memory_bytes": Foreign(VLLM, "kv_cache_memory_gb"),
    "cpu_offload_gb": Foreign(VLLM, "nothing: the weights lie in the memory of the one device that device names"),
    "load_format": Foreign(VLLM, "nothing: weights are read from safetensors files"),
    "compilation_config": Foreign(VLLM, "enforce_eager"),
    "enable_lora": Foreign(VLLM, _ADAPTERS),
    "lora_modules": Foreign(VLLM, _ADAPTERS),
    "max_loras": Foreign(VLLM, _ADAPTERS),
    "max_lora_rank": Foreign(VLLM, _ADAPTERS),
    "kv_transfer_config": Foreign(VLLM, "splitwise_role, and router before the instances"),
    "enable_sleep_mode": Foreign(VLLM, "nothing: stop the server to free its memory"),
    "default_chat_template_kwargs": Foreign(VLLM, "chat_template_kwargs, a field of the request"),
    "no_enable_log_requests": Foreign(VLLM, "nothing: the text of requests is never logged"),
    "disable_log_requests": Foreign(VLLM, "nothing: the text of requests is never logged"),
    "ssl_keyfile": Foreign(VLLM, _TLS),
    "ssl_certfile": Foreign(VLLM, _TLS),
    "mem_fraction_static": Foreign(SGLANG, "kv_cache_memory_gb"),
    "chunked_prefill_size": Foreign(SGLANG, _STEP),
    "speculative_algorithm": Foreign(SGLANG, _METHOD),
    "speculative_num_draft_tokens": Foreign(SGLANG, _DRAFTS),
    "speculative_num_steps": Foreign(SGLANG, "speculative_config.num_model_steps"),
    "speculative_draft_model_path": Foreign(SGLANG, "speculative_config.model, of MTP weights"),
    "c": Foreign(LLAMA_CPP, _CONTEXT),
    "ctx_size": Foreign(LLAMA_CPP, _CONTEXT),
    "b": Foreign(LLAMA_CPP, _STEP),
    "batch_size": Foreign(LLAMA_CPP, _STEP),
    "ub": Foreign(LLAMA_CPP, _STEP),
    "ubatch_size": Foreign(LLAMA_CPP, _STEP),
    "ngl": Foreign(LLAMA_CPP, _ALL_LAYERS),
    "n_gpu_layers": Foreign(LLAMA_CPP, _ALL_LAYERS),
    "ctk": Foreign(LLAMA_CPP, _KV_DTYPE),
    "ctv": Foreign(LLAMA_CPP, _KV_DTYPE),
    "cache_type_k": Foreign(LLAMA_CPP, _KV_DTYPE),
    "cache_type_v": Foreign(LLAMA_CPP, _KV_DTYPE),
    "fa": Foreign(LLAMA_CPP, _ALWAYS),
    "flash_attn": Foreign(LLAMA_CPP, _ALWAYS),
    "cb": Foreign(LLAMA_CPP, _ALWAYS),
    "cont_batching": Foreign(LLAMA_CPP, _ALWAYS),
    "jinja": Foreign(LLAMA_CPP, _ALWAYS),
    "metrics": Foreign(LLAMA_CPP, _ALWAYS),
    "hf": Foreign(LLAMA_CPP, _HUB),
    "hf_repo": Foreign(LLAMA_CPP, _HUB),
    "md": Foreign(LLAMA_CPP, _DRAFT_MODEL),
    "model_draft": Foreign(LLAMA_CPP, _DRAFT_MODEL),
    "draft": Foreign(LLAMA_CPP, _DRAFTS),
    "draft_max": Foreign(LLAMA_CPP, _DRAFTS),
    "spec_draft_n_max": Foreign(LLAMA_CPP, _DRAFTS),
    "spec_type": Foreign(LLAMA_CPP, _METHOD),
    "n_predict": Foreign(LLAMA_CPP, _IN_REQUESTS),
    "temp": Foreign(LLAMA_CPP, _IN_REQUESTS),
    "top_k": Foreign(LLAMA_CPP, _IN_REQUESTS),
    "top_p": Foreign(LLAMA_CPP, _IN_REQUESTS),
    "threads_http": Foreign(LLAMA_CPP, "workers, which are processes"),
}


def advice(name: str) -> str:
    """Return " (vLLM's; use ... here)" for an option of another program, or ""."""
    foreign = OTHER_MEANING.get(name)
    return f" (of {foreign.program}; here: {foreign.here})" if foreign else ""
