"""The paths of the API that servers answer and routers relay."""

from __future__ import annotations

from fastdeploy_sd.wire.http.error_format import (
    COUNT_TOKENS_PATH,
    EMBEDDINGS_PATH,
    INFILL_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
)
from fastdeploy_sd.wire.http.ollama_models import CHAT_PATH, EMBED_PATH, GENERATE_PATH, OLD_EMBED_PATH, SHOW_PATH

# Of requests that an engine runs.
GENERATION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    RESPONSES_PATH,
    MESSAGES_PATH,
    CHAT_PATH,
    GENERATE_PATH,
    INFILL_PATH,
    EMBEDDINGS_PATH,
    EMBED_PATH,
    OLD_EMBED_PATH,
)
LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# Of requests that need the model's files only.
TEXT_PATHS = ("/tokenize", "/detokenize", COUNT_TOKENS_PATH, SHOW_PATH)
