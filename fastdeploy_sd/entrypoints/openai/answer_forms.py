"""Decides how the answer to a body is parsed, and which grammar it must follow.

For one model; the same for the server and LLM. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.answer_options import AnswerOptions
from fastdeploy_sd.entrypoints.openai.protocol import GenerationBody
from fastdeploy_sd.entrypoints.openai.thinking import Thinking
from fastdeploy_sd.entrypoints.openai.tool_calling import ToolCalling
from fastdeploy_sd.rules.requests import verify_grammar_length
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.prompt import PromptEncoder


class AnswerForms:
    """Answers of one model.

    Args:
        encoder: of the model.
        config: names the formats of its calls and of its thinking.
        eos_token_ids: of its requests.
        verify_grammar: gets a grammar and the field that asks for it, and raises BadRequest.

    Raises ConfigError: there is no such format.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        config: Config,
        eos_token_ids: Iterable[int],
        verify_grammar: Callable[[str, str], None],
    ) -> None:
        self._thinking = Thinking(encoder, config, eos_token_ids)
        self._forces_usage = config.server.enable_force_include_usage
        self._tools = ToolCalling(config.model.tool_call_parser, encoder.tokenizer, verify_grammar)

    def of(
        self, body: GenerationBody, params: SamplingParams, prompt: Sequence[int], asked: str
    ) -> tuple[AnswerOptions, str]:
        """Return how to answer, and the grammar of the whole output, "" = it is free.

        Args:
            params: of the body.
            prompt: its token ids.
            asked: the grammar that the body asks for, "" = none.

        Raises BadRequest: see ToolCalling.of, Thinking.grammar and verify_grammar_length.
        """
        tools, grammar = self._tools.of(body, params, asked)
        grammar = self._thinking.grammar(grammar, body, prompt)
        of_asked = body.all_asked[0].field if body.all_asked else "structured_outputs"
        verify_grammar_length(len(grammar), of_asked if asked else "tools")
        reasoning = self._thinking.options(body, prompt)
        of_tools = () if tools is None else self._tools.shown_ids
        of_thinking = () if reasoning is None else self._thinking.shown_ids
        options = AnswerOptions.of(body)
        options = replace(options, includes_usage=options.includes_usage or self._forces_usage)
        return replace(options, reasoning=reasoning, tools=tools, shown_ids=(*of_tools, *of_thinking)), grammar
