"""The body of llama.cpp's /infill, which editors send."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field

from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, Ignored, NotSupported, Only, Sampling
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody
from fastdeploy_sd.entrypoints.openai.protocol.ollama_options import ONE_TEXT, NumPredict
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import number_schema
from fastdeploy_sd.sampling_params import SamplingParams

_MAX_FILES = 1024


class InfillFile(Body):
    """A part of another file, or of this one elsewhere."""

    text: str
    filename: str | None = None
    time: Ignored = None  # when an editor has taken it


class InfillBody(GenerationBody):
    """POST /infill.

    Attributes:
        input_prefix, input_suffix: the text before the gap and after it.
        prompt: the beginning of what fills it.
        input_extra: Annotated[list[InfillFile] | None, Field(max_length=_MAX_FILES), FailFast()] = None
        n_predict: 0, -1 and -2 are no limit.
        repeat_penalty: repetition_penalty, which counts the prompt and the whole output.
        id_slot .. response_fields: of no effect. Samplers have one order; no time is limited, nor any indentation asked
            for; an answer has all fields.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: Annotated[list[InfillFile] | None, Field(max_length=_MAX_FILES), FailFast()] = None
    n_predict: Annotated[int | None, NumPredict()] = None  # type: ignore[assignment]
    repeat_penalty: Annotated[Any, Sampling("repetition_penalty", number_schema("repetition_penalty"))] = None

    id_slot: Ignored = None
    samplers: Ignored = None
    n_indent: Ignored = None
    n_keep: Ignored = None
    t_max_prompt_ms: Ignored = None
    t_max_predict_ms: Ignored = None
    timings_per_token: Ignored = None
    response_fields: Ignored = None
    n_probs: Annotated[None, Only(0, instead="/v1/completions has logprobs")] = None
    return_tokens: Annotated[None, Only(False, instead="/v1/completions has return_token_ids")] = None
    post_sampling_probs: Annotated[None, Only(False)] = None
    lora: NotSupported = None

    n: Annotated[None, Only(1, instead=ONE_TEXT)] = None
    best_of: Annotated[None, Only(1, instead=ONE_TEXT)] = None
    prompt_logprobs: NotSupported = None
    return_token_ids: Annotated[None, Only(False)] = None
    return_tokens_as_token_ids: Annotated[None, Only(False)] = None
    return_token_sources: Annotated[None, Only(False)] = None
    include_draft_logprobs: Annotated[None, Only(False)] = None

    @property
    def extra(self) -> list[tuple[str, str]]:
        """Names and texts of the parts of files; "" = one without a name."""
        return [(file.filename or "", file.text) for file in self.input_extra or ()]

    @property
    def collects_metrics(self) -> bool:
        return True

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        penalty = {} if self.repeat_penalty is None else {"repetition_penalty": self.repeat_penalty}
        max_tokens = self.n_predict if self.max_tokens is None else self.max_tokens
        return self._build_sampling_params(max_tokens, None, {**defaults, **penalty})
