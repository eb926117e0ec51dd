"""The fields of a body that say where the prompt of a conversation ends."""

from __future__ import annotations

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import Body
from fastdeploy_sd.entrypoints.openai.protocol.message import ChatMessage
from fastdeploy_sd.text.chat_template import PromptEnd

_CONTINUE = "continue_final_message"


class PromptEndFields(Body):
    """Where the prompt of a conversation ends.

    Attributes:
        add_generation_prompt: false = after the last message, with nothing that begins the assistant's turn.
        continue_final_message: true = inside the last message, which is the assistant's, so that the model goes on
            with it; then add_generation_prompt is false by itself.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def prompt_end(self) -> PromptEnd:
        """What the two fields say together."""
        if self.continue_final_message:
            return PromptEnd.CONTINUED
        return PromptEnd.PLAIN if self.add_generation_prompt is False else PromptEnd.TURN


def prompt_end_faults(fields: PromptEndFields, messages: list[ChatMessage]) -> list[Fault]:
    """Return what contradicts the last message, or one another. `messages` is empty where the prompt is raw."""
    if not fields.continue_final_message:
        return []
    if fields.add_generation_prompt:
        name = "add_generation_prompt"
        return [Fault(f"{name}: expected false with {_CONTINUE}, got true", name)]
    got = "none" if not messages else f"one of the role {messages[-1].role!r}"
    if messages and messages[-1].role == "assistant":
        if not messages[-1].calls:
            return []
        got = "one with tool calls"
    return [Fault(f"{_CONTINUE}: expected a last message that is the assistant's text, got {got}", _CONTINUE)]
