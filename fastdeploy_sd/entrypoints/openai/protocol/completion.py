"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    TOKEN_IDS_SCHEMA,
    FieldKind,
    Only,
    expected,
    is_token_ids,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import AnyMaxTokens, NumLogprobs
from fastdeploy_sd.sampling_params import SamplingParams

MAX_PROMPTS = 1024
Prompt = str | list[int]


class Prompts(FieldKind):
    """One prompt or several, of one kind (without `takes_text` token ids only); the body holds a list of them."""

    def __init__(self, takes_text: bool) -> None:
        self._takes_text = takes_text
        kinds: list[dict[str, Any]] = [TOKEN_IDS_SCHEMA, *([{"type": "string"}] if takes_text else [])]
        several = [{"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_PROMPTS} for kind in kinds]
        self.schema = {"anyOf": [*({**kind, "minItems": 1} if kind is TOKEN_IDS_SCHEMA else kind for kind in kinds)]}
        self.schema["anyOf"] += several

    def convert(self, value: Any) -> list[Prompt]:
        one = "a string, token ids" if self._takes_text else "token ids"
        prompts = [value] if isinstance(value, str) or (value and is_token_ids(value)) else value
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
            raise expected(f"{one}, or a list of 1..{MAX_PROMPTS} of {'either' if self._takes_text else 'them'}")
        is_text = self._takes_text and all(isinstance(p, str) for p in prompts)
        if not is_text and not all(map(is_token_ids, prompts)):
            raise expected(f"{one} (integers), or a list of {'either' if self._takes_text else 'them'}")
        return prompts


class CompletionBody(GenerationBody):
    """POST /v1/completions.

    Attributes:
        prompt: one or several prompts, as text or token ids; after validation always a list.
        prompt_token_ids: the same as token ids in `prompt`, which must then be absent.
        echo: put the prompt before the generated text, and its log-probabilities before those of the text.
        max_tokens: also 0, which computes the prompt only.
        suffix: what follows the completion, for models with marks for filling in the middle.
    """

    prompt: Annotated[list[Prompt] | None, Prompts(takes_text=True)] = None
    prompt_token_ids: Annotated[list[Prompt] | None, Prompts(takes_text=False)] = None
    echo: bool | None = None
    logprobs: NumLogprobs = None
    max_tokens: AnyMaxTokens = None

    suffix: str | None = None
    add_special_tokens: Annotated[None, Only(True)] = None
    enable_thinking: Annotated[None, Only(False, instead="a text completion has no chat template")] = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, in whichever of the two fields they came."""
        return self.prompt or self.prompt_token_ids or []

    @property
    def sent_names(self) -> Mapping[str, str]:
        return {"prompt": "prompt_token_ids"} if self.prompt is None else {"prompt_token_ids": "prompt"}

    def contradictions(self) -> list[Fault]:
        faults = super().contradictions()
        if (self.prompt is None) == (self.prompt_token_ids is None):
            got = "neither" if self.prompt is None else "both"
            faults.append(Fault(f"prompt: expected either prompt or prompt_token_ids, got {got}", "prompt"))
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            faults.append(Fault("suffix: expected only with a prompt that is text, got token ids", "suffix"))
        if self.suffix and self.echo:
            faults.append(Fault("suffix: expected only without echo, got both", "suffix"))
        return faults

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        params = self._build_sampling_params(self.max_tokens, self.logprobs, defaults)
        if not self.echo or params.logprobs is None:
            return params
        return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
