"""`structured_outputs` of LLM -> a grammar for each prompt. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.guidance.grammar import StructuredOutputs, against_grammar, grammar_of
from fastdeploy_sd.text.tokenizer import Tokenizer

Structured = StructuredOutputs | Mapping[str, Any]
_NAME = "structured_outputs"


class OfflineGrammars:
    """Makes grammars for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _checker(self) -> GrammarChecker:
        return GrammarChecker.of(self._tokenizer)

    def verify(self, grammar: str, field: str) -> None:
        """Refuse a grammar that cannot be compiled; see GrammarChecker.verify."""
        self._checker.verify(grammar, field)

    def per_prompt(
        self, given: Structured | Sequence[Structured | None] | None, params: Sequence[SamplingParams]
    ) -> list[str]:
        """Return one grammar for each prompt, "" = none, whether one for all, one each or none was given.

        `params`: of each prompt. Raises BadRequest: another number of them, one that is wrong or cannot be compiled, or
        a sampling option that contradicts it.
        """
        if given is None or isinstance(given, StructuredOutputs | Mapping):
            return [self._grammar(given, params)] * len(params)
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(params):
            wanted = f"StructuredOutputs, or one or None for each of {len(params)} prompts"
            raise BadRequest(f"{_NAME}: expected {wanted}", param=_NAME)
        return [self._grammar(one, [own]) for one, own in zip(given, params, strict=True)]

    def _grammar(self, given: Structured | None, params: Sequence[SamplingParams]) -> str:
        if given is None:
            return ""
        grammar = grammar_of(StructuredOutputs.of(given, _NAME), _NAME)
        for own in params:
            for error in against_grammar(own):
                raise error
        self.verify(grammar, _NAME)
        return grammar
