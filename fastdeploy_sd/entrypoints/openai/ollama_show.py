"""What Ollama's routes tell of the served model."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.protocol import OllamaShowBody, parse_body
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.reasoning_formats import find_format
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.text.tool_calls.formats import find_format as find_call_format
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.http.model_names import ModelNames
from fastdeploy_sd.wire.http.ollama_models import OllamaModel


class OllamaShow:
    """Answers /api/show: bytes of a body -> JSON."""

    def __init__(self, encoder: PromptEncoder, config: Config, model_info: ModelInfo, names: ModelNames) -> None:
        self._tokenizer = encoder.tokenizer
        self._config, self._names = config, names
        self._info = model_info
        self._capabilities = ["completion"]
        template = encoder.tokenizer.files.chat_template
        if encoder.has_template and find_call_format(config.model.tool_call_parser, template) is not None:
            self._capabilities.append("tools")
        if encoder.infill is not None:
            self._capabilities.append("insert")
        if model_info.hidden_size:
            self._capabilities.append("embedding")
        if find_format(config.model.reasoning_parser, template) is not None:
            self._capabilities.append("thinking")

    def show(self, content: bytes) -> dict[str, Any]:
        """Return what is known of the model. BadRequest: the body is wrong; NotFound: it asks for another model."""
        body = parse_body(OllamaShowBody, content)
        asked = body.name if body.model is None else body.model
        name = self._names.resolve(asked)
        template = self._tokenizer.files.chat_template or ""
        return ollama_model(name, 0, self._info, self._tokenizer, self._config).shown(template, self._capabilities)


def ollama_model(name: str, created: int, info: ModelInfo, tokenizer: Tokenizer, config: Config) -> OllamaModel:
    """Return the served model under one of its names, loaded at `created`."""
    asked = config.model.quantization
    return OllamaModel(
        name=name,
        created=created,
        context_length=info.max_request_tokens,
        fingerprint=info.fingerprint,
        size=info.weight_bytes,
        family=tokenizer.files.model_type or "",
        quantization=asked if isinstance(asked, str) and asked != "none" else "",
    )
