"""Decides how the tool calls of an answer are parsed, and which grammar it must follow. For one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, GenerationBody
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.grammar import against_grammar, verify_schema
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.text.tool_calls.formats import FORMATS, ToolOptions, find_format
from fastdeploy_sd.text.tool_calls.grammars import ends_after_calls, is_guided, tool_grammar
from fastdeploy_sd.text.tool_calls.tools import ToolMode, ToolUse


class ToolCalling:
    """Calls of functions as one model writes them.

    Args:
        verify_grammar: gets a grammar and the field that asks for it, and raises BadRequest.

    Attributes:
        shown_ids: of the format's tokens that text hides.

    Raises ConfigError: there is no such format.
    """

    def __init__(self, name: str | None, tokenizer: Tokenizer, verify_grammar: Callable[[str, str], None]) -> None:
        self._verify_grammar = verify_grammar
        self._format = find_format(name, tokenizer.files.chat_template)
        self._is_auto = name == "auto"
        markers = () if self._format is None else FORMATS[self._format].markers
        self._hidden_ids = {
            text: token_id
            for text in markers
            if (token_id := tokenizer.control_tokens.get(text)) is not None and token_id in tokenizer.hidden_ids
        }
        self.shown_ids = tuple(self._hidden_ids.values())

    def of(self, body: GenerationBody, params: SamplingParams, content: str) -> tuple[ToolOptions | None, str]:
        """Return how to read the calls of an answer, None = it has none, and its grammar, "" = it is free.

        `content`: the grammar of an answer that calls nothing, "" = it is free. Raises BadRequest: the server reads no
        calls; or calls are guided, and the model's format cannot write the parameters of a function, their schema is
        not one that can be kept, or an option contradicts a grammar.
        """
        use = body.tool_use
        if use is None:
            return None, content
        if self._format is None:
            raise BadRequest(
                "tools: expected none, as this server was started with tool_call_parser none, got some",
                param="tools",
                code="not_supported",
            )
        is_legacy = isinstance(body, ChatCompletionBody) and bool(body.functions)
        functions = tuple(tool.as_callable() for tool in use.callable_tools)
        form, must_guide = FORMATS[self._format], is_guided(use) or bool(content)
        # A bare call must be guided, too, and is not where the format writes parameters one by one: it would take a
        # second grammar of each.
        is_free = use.mode is ToolMode.AUTO and not content
        reads_bare = self._is_auto and is_free and not (must_guide and form.text.parameters is not None)
        options = ToolOptions(self._format, functions, reads_bare, is_legacy, ends_after_calls(form, use))
        if not must_guide:
            return options, ""
        for error in against_grammar(params):
            raise error
        for tool in use.callable_tools:
            verify_schema(tool.parameters or {}, f"tools.{tool.name}.parameters")
        grammar = tool_grammar(form, use, self._hidden_ids, content, reads_bare=options.reads_bare)
        self._verify_grammar(grammar, "tools")
        return options, grammar


def offered_tools(use: ToolUse | None) -> list[Mapping[str, Any]]:
    """Return the functions as a chat template gets them."""
    return [] if use is None else [tool.definition for tool in use.tools]
