"""Raw prompts and conversations -> prompt token ids, for one checkpoint. Knows no request and no sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fastdeploy_sd.entrypoints.text.chat_template import ChatTemplate, Json, Message
from fastdeploy_sd.entrypoints.text.tokenizer import Tokenizer
from fastdeploy_sd.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
# OpenAI renamed the role; chat templates know the older name.
_TEMPLATE_ROLES = {"developer": "system"}


class PromptEncoder:
    """Encodes prompts with a checkpoint's tokenizer and chat template.

    Raises:
        CheckpointError: the chat template is not valid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        source = tokenizer.files.chat_template
        special = tokenizer.files.special_tokens
        self._template = None if source is None else ChatTemplate(source, special, tokenizer.control_tokens)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a raw prompt: control tokens written in it act, and a BOS is added if the model has one."""
        return self._tokenizer.encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message], kwargs: Mapping[str, Json]) -> list[int]:
        """Return the ids of a conversation; control tokens written in messages are plain text.

        Raises:
            BadRequest: no messages, an unknown role, no chat template, or the template refuses.
        """
        if not messages:
            raise BadRequest("messages: expected at least one message, got none", param="messages")
        for i, message in enumerate(messages):
            if message.role not in ROLES:
                raise BadRequest(
                    f"messages[{i}].role: expected one of {', '.join(ROLES)}, got {message.role!r}", param="messages"
                )
        if self._template is None:
            raise BadRequest(
                "messages: expected a model with a chat template, got one without (use /v1/completions)",
                param="messages",
            )
        turns = [replace(m, role=_TEMPLATE_ROLES.get(m.role, m.role)) for m in messages]
        token_ids: list[int] = []
        for segment in self._template.render(turns, kwargs):
            if segment.is_plain:
                token_ids += self._tokenizer.encode_plain(segment.text)
            else:
                token_ids += self._tokenizer.encode(segment.text, add_special_tokens=False)
        return token_ids

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences a forbidden text has: at the start of a line and after a space."""
        forms = (word, " " + word.lstrip(" "))
        return list(dict.fromkeys(ids for form in forms if (ids := tuple(self._encode_fragment(form)))))

    def _encode_fragment(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text according to the tokenizer's files."""
        return self._tokenizer.eos_token_ids
