"""Decides how the reasoning of an answer is split off, and where a grammar begins. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.protocol import GenerationBody
from fastdeploy_sd.text.guidance.reasoning import ThinkingGrammar, no_limit
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.reasoning_formats import Display, ReasoningOptions, Start, find_format, start_of


class Thinking:
    """How the loaded model thinks, if it does.

    Args:
        encoder: of the model.
        config: names the format of its thinking.
        eos_token_ids: of its requests.

    Attributes:
        shown_ids: of the tokens that are marks of thinking and that text hides.
    """

    def __init__(self, encoder: PromptEncoder, config: Config, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = encoder.tokenizer
        self._form = find_format(config.model.reasoning_parser, self._tokenizer.files.chat_template)
        ids = self._tokenizer.control_tokens
        marks = () if self._form is None else self._form.marks
        self.shown_ids = tuple(ids[mark] for mark in marks if ids.get(mark) in self._tokenizer.hidden_ids)
        self._grammar = None if self._form is None else ThinkingGrammar(self._form, self._tokenizer, eos_token_ids)

    def options(self, body: GenerationBody, prompt: Sequence[int]) -> ReasoningOptions | None:
        """Return how to tell apart what the model thinks, None = it is not told apart. `prompt`: its token ids."""
        display = body.reasoning_display
        if self._form is None or display is None or display is Display.UNSPLIT:
            return None
        return ReasoningOptions(self._form, self._start(body, prompt), display)

    def grammar(self, grammar: str, body: GenerationBody, prompt: Sequence[int]) -> str:
        """Return the grammar of the whole output.

        Args:
            grammar: of the answer, "" = anything; see ThinkingGrammar.wrap.
            prompt: its token ids.

        Raises BadRequest: the request limits the thinking, and that cannot be done.
        """
        max_tokens = body.max_reasoning_tokens
        if body.reasoning_display is None or (not grammar and max_tokens is None):
            return grammar
        if self._grammar is None:
            if max_tokens is not None:
                raise no_limit("this server does not know how its model marks thinking (reasoning_parser)")
            return grammar
        return self._grammar.wrap(grammar, self._start(body, prompt), max_tokens)

    def _start(self, body: GenerationBody, prompt: Sequence[int]) -> Start:
        assert self._form is not None
        if body.continues_answer:
            return Start.ANSWER
        return start_of(self._form, prompt, lambda ids: self._tokenizer.decode(ids, skip_hidden=False))
