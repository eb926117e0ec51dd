"""Answers /tokenize and /detokenize. Needs the sizes of the engine only."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.entrypoints.openai.logprobs import token_label
from fastdeploy_sd.entrypoints.openai.protocol import DetokenizeBody, TokenizeBody, parse_body
from fastdeploy_sd.rules.sampling import verify_token_ids
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.http.model_names import ModelNames


class Tokenization:
    """Bytes of a body -> JSON of the answer. Slow for long texts: call it off the event loop."""

    def __init__(self, encoder: PromptEncoder, tokenizer: Tokenizer, model_info: ModelInfo, names: ModelNames) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._info = model_info
        self._names = names

    def tokenize(self, content: bytes) -> dict[str, Any]:
        """Return the tokens of a prompt or conversation.

        Raises:
            BadRequest: the body is wrong, or the chat template refuses the messages.
            NotFound: it asks for another model.
        """
        body = parse_body(TokenizeBody, content)
        self._names.resolve(body.model)
        limit = self._info.max_model_len
        if body.prompt is None:
            turns = [message.as_turn() for message in body.messages]
            offered = [tool.definition for tool in body.tools or ()]
            kwargs = body.chat_template_kwargs or {}
            token_ids = self._encoder.encode_chat(turns, kwargs, limit - 1, offered, body.prompt_end)
        else:
            has_bos = body.add_special_tokens is not False
            token_ids = self._encoder.encode_text(body.prompt, limit - 1, add_special_tokens=has_bos)
        texts = [token_label(self._tokenizer, i) for i in token_ids] if body.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": texts}

    def detokenize(self, content: bytes) -> dict[str, Any]:
        """Return the text of tokens, with control tokens visible.

        Raises:
            BadRequest: the body is wrong, or an id is outside the vocabulary.
            NotFound: it asks for another model.
        """
        body = parse_body(DetokenizeBody, content)
        self._names.resolve(body.model)
        verify_token_ids("tokens", body.tokens, self._info.vocab_size)
        return {"prompt": self._tokenizer.decode(body.tokens, skip_hidden=False)}
