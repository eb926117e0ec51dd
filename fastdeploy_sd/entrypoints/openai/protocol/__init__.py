"""The bodies of /v1/chat/completions and /v1/completions: OpenAI's fields, and FastDeploy's extensions.

This and SamplingParams are where a request is validated: here shapes and combinations, there the range of every
sampling option (so those are `Any` here, and the server and LLM say the same about a wrong value). What depends on the
loaded model is checked in text/request_builder.py.

Defaults are OpenAI's (temperature 1, top_p 1); a checkpoint's generation_config does not change them.
"""

from __future__ import annotations

from fastdeploy_sd.entrypoints.openai.protocol.chat import ChatCompletionBody
from fastdeploy_sd.entrypoints.openai.protocol.completion import CompletionBody
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody

__all__ = ["Body", "ChatCompletionBody", "CompletionBody", "GenerationBody"]
