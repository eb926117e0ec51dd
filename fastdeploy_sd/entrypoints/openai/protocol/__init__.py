"""The bodies of requests: OpenAI's fields, FastDeploy's extensions, and other servers' options that ask for nothing.

This and SamplingParams are where a request is validated: here shapes and combinations, there the range of every
sampling option, so that the server and LLM say the same about a wrong value. What depends on the loaded model is
checked in text/request_builder.py. All faults of a body come in one report.

Defaults are those of the checkpoint (text/request_defaults.py), else OpenAI's: temperature 1, top_p 1.
"""

from __future__ import annotations

from fastdeploy_sd.entrypoints.openai.protocol.body import parse_body
from fastdeploy_sd.entrypoints.openai.protocol.chat import ChatCompletionBody
from fastdeploy_sd.entrypoints.openai.protocol.completion import CompletionBody
from fastdeploy_sd.entrypoints.openai.protocol.embedding import (
    EmbeddingBody,
    EmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
)
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody
from fastdeploy_sd.entrypoints.openai.protocol.infill import InfillBody
from fastdeploy_sd.entrypoints.openai.protocol.messages import CountTokensBody, MessagesBody
from fastdeploy_sd.entrypoints.openai.protocol.ollama import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from fastdeploy_sd.entrypoints.openai.protocol.response import ResponseBody
from fastdeploy_sd.entrypoints.openai.protocol.tokenization import DetokenizeBody, TokenizeBody

__all__ = [
    "Body",
    "ChatCompletionBody",
    "CompletionBody",
    "CountTokensBody",
    "DetokenizeBody",
    "EmbeddingBody",
    "EmbeddingsBody",
    "GenerationBody",
    "InfillBody",
    "MessagesBody",
    "OllamaBody",
    "OllamaChatBody",
    "OllamaEmbedBody",
    "OllamaEmbeddingsBody",
    "OllamaGenerateBody",
    "OllamaShowBody",
    "ResponseBody",
    "TokenizeBody",
    "parse_body",
]
