"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, NotSupported, SmallMap, TokenIds
from fastdeploy_sd.entrypoints.openai.protocol.message import (
    MAX_MESSAGES,
    ChatMessage,
    PromptEndFields,
    prompt_end_faults,
)
from fastdeploy_sd.entrypoints.openai.protocol.tools import Tools
from fastdeploy_sd.text.tool_calls.tools import Tool


class TokenizeBody(PromptEndFields):
    """POST /tokenize.

    Attributes:
        prompt: a raw prompt, or
        messages: a conversation, rendered by the chat template up to where the assistant's turn begins, or to where
            the fields of PromptEndFields say.
        add_special_tokens: of a raw prompt: the BOS of models that have one. Null = true.
        return_token_strs: add the text of each token.
        tools: functions that the conversation offers, as in a chat completion.
        chat_template_kwargs: extra variables of the checkpoint's chat template.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], FailFast(), Field(max_length=MAX_MESSAGES)] = Field(default=[])
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: SmallMap | None = None
    chat_template: NotSupported = None
    tools: Annotated[tuple[Tool, ...] | None, Tools()] = None
    mm_processor_kwargs: NotSupported = None

    def contradictions(self) -> list[Fault]:
        if (self.prompt is None) == (not self.messages):
            got = "neither" if self.prompt is None else "both"
            return [Fault(f"prompt: expected either prompt or messages, got {got}", "prompt")]
        if self.messages and self.add_special_tokens:
            name = "add_special_tokens"
            return [Fault(f"{name}: expected false with messages (the chat template writes them), got true", name)]
        return prompt_end_faults(self, self.messages)


class DetokenizeBody(Body):
    """POST /detokenize.

    Attributes:
        tokens: ids of the vocabulary.
    """

    model: str | None = None
    tokens: Annotated[list[int], TokenIds(takes_null=False)]
