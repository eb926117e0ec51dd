"""Normalises the arguments of LLM's methods. Knows no engine and no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastdeploy_sd.entrypoints.offline.adapters import Adapters
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.guidance.grammar import StructuredOutputs, against_grammar, grammar_of
from fastdeploy_sd.text.speculation import SpeculationOptions
from fastdeploy_sd.text.tokenizer import Tokenizer


def params_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt, whether one for all, one each or none was given.

    Raises BadRequest: another number of them, or something else.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    what = f"sampling_params: expected a SamplingParams or one for each of {num_prompts} prompts"
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise BadRequest(f"{what}, got {type(sampling_params).__name__}", param="sampling_params")
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"{what}, got {type(params).__name__} among them", param="sampling_params")
    if len(sampling_params) != num_prompts:
        raise BadRequest(f"{what}, got {len(sampling_params)}", param="sampling_params")
    return list(sampling_params)


def texts_per_prompt(name: str, texts: str | Sequence[str | None] | None, num_prompts: int) -> list[str]:
    """Return one text for each prompt, "" = none, whether one for all, one each or none was given.

    Raises BadRequest: another number of them, or something else; it names `name`.
    """
    if texts is None or isinstance(texts, str):
        return [texts or ""] * num_prompts
    found = list(texts)
    if len(found) != num_prompts or not all(text is None or isinstance(text, str) for text in found):
        raise BadRequest(f"{name}: expected a text, or a text or None for each of {num_prompts} prompts", param=name)
    return [text or "" for text in found]


def token_id_lists(value: Any) -> list[list[int]]:
    """Return a list of prompts, whether one or several were given. Raises BadRequest: not token ids."""
    items = list(value)
    prompts = [items] if items and not isinstance(items[0], Sequence) and not hasattr(items[0], "__len__") else items
    try:
        return [[int(i) for i in prompt] for prompt in prompts]
    except (TypeError, ValueError):
        raise BadRequest(
            "prompt_token_ids: expected a list of token ids or a list of those, got something else",
            param="prompt_token_ids",
        ) from None


Structured = StructuredOutputs | Mapping[str, Any]
_NAME = "structured_outputs"


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What a call asks for besides sampling; see LLM.generate."""

    speculation: SpeculationOptions
    predictions: str | Sequence[str | None] | None
    structured_outputs: Structured | Sequence[Structured | None] | None
    adapters: Adapters


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

        Raises BadRequest: another number of them, one that is wrong or cannot be compiled, or a sampling option that
        contradicts it.
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
