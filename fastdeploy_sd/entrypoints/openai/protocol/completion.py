"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from fastdeploy_sd.entrypoints.openai.protocol.fields import NotSupported, expected
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams

MAX_PROMPTS = 1024
Prompt = str | list[int]


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _prompt_list(value: object) -> object:
    """Turn every accepted form into a list of prompts."""
    if value is None:
        return None
    prompts = [value] if isinstance(value, str) or (value and _is_token_ids(value)) else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise expected(f"a string, token ids, or a list of 1..{MAX_PROMPTS} of either")
    if not (all(isinstance(p, str) for p in prompts) or all(_is_token_ids(p) for p in prompts)):
        raise expected("a string, token ids (integers), or a list of either")
    return prompts


class CompletionBody(GenerationBody):
    """POST /v1/completions.

    Attributes:
        prompt: one or several prompts, as text or token ids; after validation always a list.
        prompt_token_ids: the same as token ids in `prompt`, which must then be absent.
        echo: put the prompt before the generated text.
        best_of: only the value of n: nothing is generated to be thrown away.
    """

    prompt: Annotated[list[Prompt] | None, BeforeValidator(_prompt_list)] = None
    prompt_token_ids: Annotated[list[Prompt] | None, BeforeValidator(_prompt_list)] = None
    echo: bool | None = None
    logprobs: Any = None
    best_of: int | None = None

    suffix: NotSupported = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, in whichever of the two fields they came."""
        return self.prompt or self.prompt_token_ids or []

    @model_validator(mode="after")
    def _verify_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            got = "neither" if self.prompt is None else "both"
            raise BadRequest(f"prompt: expected either prompt or prompt_token_ids, got {got}", param="prompt")
        if self.prompt_token_ids is not None and any(isinstance(p, str) for p in self.prompt_token_ids):
            raise BadRequest("prompt_token_ids: expected token ids, got text", param="prompt_token_ids")
        if self.echo and self.logprobs is not None:
            raise BadRequest("echo: logprobs of prompt tokens are not supported; expected one of the two", param="echo")
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the validated sampling options.

        Raises:
            BadRequest: a value is out of range, or options contradict each other.
        """
        params = self._build_sampling_params(self.max_tokens, self.logprobs)
        if self.best_of is not None and self.best_of != params.n:
            raise BadRequest(f"best_of: expected the value of n ({params.n}), got {self.best_of}", param="best_of")
        return params
