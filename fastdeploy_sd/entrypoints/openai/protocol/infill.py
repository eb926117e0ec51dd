"""The body of llama.cpp's /infill, which editors send."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field

from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    Body,
    FieldKind,
    Ignored,
    Integer,
    NotSupported,
    Only,
    Sampling,
    expected,
)
from fastdeploy_sd.entrypoints.openai.protocol.generation import GenerationBody
from fastdeploy_sd.entrypoints.openai.protocol.ollama_options import ONE_TEXT
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import AnyMaxTokens, number_schema
from fastdeploy_sd.rules.sampling import MAX_COUNT
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.line_limits import LineLimits

_MAX_FILES = 1024
_MAX_FIELDS = 64
# llama.cpp's name of each sampler -> the fields that it reads. `infill`, which editors always name, has no effect; the
# fields of the samplers after it are refused.
_SAMPLERS: Mapping[str, tuple[str, ...]] = {
    "penalties": ("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "infill": (),
    "dry": (),
    "top_n_sigma": (),
    "typ_p": (),
    "xtc": (),
}


class _Samplers(FieldKind):
    """A list of names of samplers."""

    schema: Mapping[str, Any] = {
        "type": "array",
        "items": {"enum": list(_SAMPLERS)},
        "maxItems": _MAX_FIELDS,
    }

    def convert(self, value: Any) -> tuple[str, ...]:
        is_list = isinstance(value, list) and len(value) <= _MAX_FIELDS
        if not is_list or not all(isinstance(name, str) and name in _SAMPLERS for name in value):
            raise expected(f"a list of at most {_MAX_FIELDS} of {', '.join(_SAMPLERS)}")
        return tuple(value)


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
        n_predict: 0 = only the prompt is computed, for requests that begin like it; -1 = no limit.
        repeat_penalty: repetition_penalty, which counts the prompt and the whole output.
        samplers: the options that no named one reads are as if they were not sent. They have one order.
        n_indent, t_max_predict_ms: see LineLimits; -1 and 0 are no limit.
        response_fields: those of the answer, none = all; a/b is field b of object a.
        id_slot .. timings_per_token: of no effect; so is t_max_prompt_ms in llama.cpp.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: Annotated[list[InfillFile] | None, Field(max_length=_MAX_FILES), FailFast()] = None
    n_predict: AnyMaxTokens = None  # type: ignore[assignment]
    repeat_penalty: Annotated[Any, Sampling("repetition_penalty", number_schema("repetition_penalty"))] = None

    samplers: Annotated[tuple[str, ...] | None, _Samplers()] = None
    n_indent: Annotated[int | None, Integer(0, MAX_COUNT)] = None
    t_max_predict_ms: Annotated[int | None, Integer(-1, MAX_COUNT)] = None
    response_fields: Annotated[list[str] | None, Field(max_length=_MAX_FIELDS), FailFast()] = None

    id_slot: Ignored = None
    n_keep: Ignored = None
    t_max_prompt_ms: Ignored = None
    timings_per_token: Ignored = None
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
    def line_limits(self) -> LineLimits | None:
        """What ends the output at a line, None = nothing."""
        limits = LineLimits(self.n_indent or 0, max(self.t_max_predict_ms or 0, 0))
        return None if limits == LineLimits() else limits

    @property
    def collects_metrics(self) -> bool:
        return True

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        named = _SAMPLERS if self.samplers is None else self.samplers
        unread = [field for name, fields in _SAMPLERS.items() if name not in named for field in fields]
        body = self.model_copy(update=dict.fromkeys(unread)) if unread else self
        penalty = {} if body.repeat_penalty is None else {"repetition_penalty": body.repeat_penalty}
        max_tokens = self.n_predict if self.max_tokens is None else self.max_tokens
        return body._build_sampling_params(max_tokens, None, {**defaults, **penalty})
