"""The `options` of Ollama's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    FieldKind,
    Ignored,
    Integer,
    NotSupported,
    Only,
    Sampling,
    fault,
)
from fastdeploy_sd.entrypoints.openai.protocol.sampling_fields import SamplingFields, number_schema
from fastdeploy_sd.rules.sampling import SOME_TOKENS

ONE_TEXT = "an answer has one text"
_NO_PENALTY = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class NumPredict(Sampling):
    """How many tokens to generate at most; 0, -1 and -2 are no limit."""

    _UNLIMITED = (0, -1, -2)

    def __init__(self) -> None:
        super().__init__("max_tokens", {**number_schema("max_tokens"), "minimum": -2}, rule=SOME_TOKENS)

    def convert(self, value: Any) -> Any:
        is_unlimited = isinstance(value, int) and not isinstance(value, bool) and value in self._UNLIMITED
        return None if is_unlimited else super().convert(value)


class _RepeatLastN(FieldKind):
    """Of how many tokens penalties count: all, for which the body holds None, or none."""

    schema: Mapping[str, Any] = {"enum": [-1, 0]}

    def convert(self, value: Any) -> int | None:
        if isinstance(value, bool) or value not in (-1, 0):
            raise fault("not_supported", "penalties count all tokens (-1) or none (0)")
        return 0 if value == 0 else None


class OllamaOptions(SamplingFields):
    """What `options` may hold: Ollama's names, and the sampling options of this server.

    Attributes:
        num_ctx: most tokens of prompt and answer together; above the model's context it is that of the model.
        repeat_penalty: repetition_penalty, which counts the prompt and the whole output.
        num_keep .. numa: of no effect: prompts are never cut, and the model is loaded already.
    """

    num_predict: Annotated[int | None, NumPredict()] = None
    num_ctx: Annotated[int | None, Integer(1)] = None
    repeat_penalty: Annotated[Any, Sampling("repetition_penalty", number_schema("repetition_penalty"))] = None
    repeat_last_n: Annotated[int | None, _RepeatLastN()] = None

    num_keep: Ignored = None
    num_batch: Ignored = None
    num_gpu: Ignored = None
    main_gpu: Ignored = None
    num_thread: Ignored = None
    use_mmap: Ignored = None
    use_mlock: Ignored = None
    low_vram: Ignored = None
    f16_kv: Ignored = None
    numa: Ignored = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    logits_all: NotSupported = None
    vocab_only: NotSupported = None
    embedding_only: NotSupported = None

    n: Annotated[None, Only(1, instead=ONE_TEXT)] = None
    prompt_logprobs: NotSupported = None
    typical_p: Annotated[None, Only(1)] = None
    tfs_z: Annotated[None, Only(1)] = None
    mirostat: Annotated[None, Only(0)] = None
    penalize_newline: Annotated[None, Only(True)] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Those that SamplingParams has, by its names."""
        given = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        return given | (_NO_PENALTY if self.repeat_last_n == 0 else {})
