"""Embeddings in OpenAI's form and in Ollama's two: hidden rows of length 1."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.entrypoints.openai.answer_format import AnswerFormat, StreamPart
from fastdeploy_sd.entrypoints.openai.ollama_format import durations
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter
from fastdeploy_sd.errors import FdsdError, InternalError
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.types import F32

Json = dict[str, Any]


class EmbeddingFormat(AnswerFormat):
    """OpenAI's list. It is never a stream."""

    stream_end = ""
    split_depth = 3

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> Json:
        data = [
            {"object": "embedding", "index": completion.index, "embedding": self._encoded(self._embedding(completion))}
            for completion in completions
        ]
        num_tokens = usage.to_json()["prompt_tokens"]
        counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self._job.model, "usage": counts}

    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        raise NotImplementedError

    def ending(self, usage: UsageCounter) -> str:
        raise NotImplementedError

    def error(self, error: FdsdError) -> StreamPart:
        raise NotImplementedError

    def _embedding(self, completion: Completion) -> F32:
        options, found = self._job.answer.embedding, completion.embedding
        if options is None or found is None:
            raise InternalError("an embedding is missing")
        return unit_length(found, options.dimensions)

    def _encoded(self, embedding: F32) -> str | list[float]:
        options = self._job.answer.embedding
        if options is not None and options.is_base64:
            return base64.b64encode(embedding.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = embedding.tolist()
        return numbers


class OllamaEmbedFormat(EmbeddingFormat):
    """The answer of /api/embed."""

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> Json:
        embeddings = [self._encoded(self._embedding(completion)) for completion in completions]
        last = completions[-1].metrics
        times = {} if last is None else durations(last)
        return {
            "model": self._job.model,
            "embeddings": embeddings,
            **{name: times[name] for name in ("total_duration", "load_duration") if name in times},
            "prompt_eval_count": usage.to_json()["prompt_tokens"],
        }


class OllamaEmbeddingsFormat(EmbeddingFormat):
    """The answer of /api/embeddings."""

    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> Json:
        [completion] = completions
        return {"embedding": self._encoded(self._embedding(completion))}


def unit_length(row: F32, dimensions: int | None = None) -> F32:
    """Return the first `dimensions` numbers of a row f32[H], None = all, divided by their length; zeros stay zeros."""
    numbers = row[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.square(numbers).sum()))
    unit: F32 = (numbers / length if length else numbers).astype(np.float32)
    return unit
