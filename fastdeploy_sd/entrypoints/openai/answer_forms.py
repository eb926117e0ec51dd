"""Decides how the answer to a body is parsed, and which grammar it must follow, for the server and LLM alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.answer_options import AnswerOptions
from fastdeploy_sd.entrypoints.openai.protocol import GenerationBody
from fastdeploy_sd.entrypoints.openai.tool_calling import ToolCalling
from fastdeploy_sd.rules.requests import verify_grammar_length
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.reasoning import ThinkingGrammar, no_limit
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.reasoning_formats import Display, ReasoningOptions, Start, find_format, start_of


class Thinking:
    """How the loaded model thinks, if it does.

    Attributes:
        shown_ids: of the tokens that marks of thinking have and that text hides.
    """

    def __init__(self, encoder: PromptEncoder, config: Config, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = encoder.tokenizer
        self._form = find_format(config.model.reasoning_parser, self._tokenizer.files.chat_template)
        ids = self._tokenizer.control_tokens
        marks = () if self._form is None else self._form.marks
        in_marks = (i for text, i in ids.items() if any(text in mark for mark in marks))
        self.shown_ids = tuple(i for i in in_marks if i in self._tokenizer.hidden_ids)
        self._grammar = None if self._form is None else ThinkingGrammar(self._form, self._tokenizer, eos_token_ids)

    def options(self, body: GenerationBody, prompt: Sequence[int]) -> ReasoningOptions | None:
        """Return how to tell apart what the model thinks, None = it is not told apart."""
        display = body.reasoning_display
        if self._form is None or display is None or display is Display.UNSPLIT:
            return None
        return ReasoningOptions(self._form, self._start(body, prompt), display)

    def headed(self, grammar: str, body: GenerationBody, prompt: Sequence[int]) -> str:
        """Return the grammar of an answer without thinking, given that of its text; see ThinkingGrammar.headed."""
        if body.reasoning_display is None or self._grammar is None or not grammar:
            return grammar
        return self._grammar.headed(grammar, self._start(body, prompt))

    def grammar(self, grammar: str, body: GenerationBody, prompt: Sequence[int]) -> str:
        """Return the grammar of the whole output, given that of the answer ("" = anything); see ThinkingGrammar.wrap.

        Raises BadRequest: the request limits the thinking, and that cannot be done.
        """
        max_tokens = body.max_reasoning_tokens
        if body.reasoning_display is None or (not grammar and max_tokens is None):
            return grammar
        if self._grammar is None:
            if max_tokens is not None and body.must_limit_reasoning:
                raise no_limit("this server does not know how its model marks thinking (reasoning_parser)")
            return grammar
        return self._grammar.wrap(grammar, self._start(body, prompt), max_tokens)

    def _start(self, body: GenerationBody, prompt: Sequence[int]) -> Start:
        assert self._form is not None
        if body.continues_answer:
            return Start.ANSWER
        return start_of(self._form, prompt, lambda ids: self._tokenizer.decode(ids, skip_hidden=False))


class AnswerForms:
    """Answers of one model.

    `verify_grammar`: gets a grammar and the field that asks for it, and raises BadRequest. Raises ConfigError: there is
    no such format.
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

        `asked`: the grammar that the body asks for, "" = none. Raises BadRequest: see ToolCalling.of, Thinking.grammar
        and verify_grammar_length.
        """
        tools, grammar = self._tools.of(body, params, self._thinking.headed(asked, body, prompt))
        grammar = self._thinking.grammar(grammar, body, prompt)
        of_asked = body.all_asked[0].field if body.all_asked else "structured_outputs"
        verify_grammar_length(len(grammar), of_asked if asked else "tools")
        reasoning = self._thinking.options(body, prompt)
        of_tools = () if tools is None else self._tools.shown_ids
        of_thinking = () if reasoning is None else self._thinking.shown_ids
        options = AnswerOptions.of(body)
        options = replace(options, includes_usage=options.includes_usage or self._forces_usage)
        return replace(options, reasoning=reasoning, tools=tools, shown_ids=(*of_tools, *of_thinking)), grammar
