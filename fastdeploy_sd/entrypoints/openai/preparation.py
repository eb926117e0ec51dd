"""Turns the bytes of a body into a job, in a thread or in a worker forked from a loaded process."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from fastdeploy_sd.config import Config, from_json
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.entrypoints.openai.body_shape import verify_shape
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.job_builder import JobBuilder, VerifyGrammar
from fastdeploy_sd.entrypoints.openai.ollama_format import loaded_answer
from fastdeploy_sd.entrypoints.openai.ollama_show import OllamaShow
from fastdeploy_sd.entrypoints.openai.protocol import (
    ChatCompletionBody,
    CompletionBody,
    CountTokensBody,
    EmbeddingBody,
    EmbeddingsBody,
    GenerationBody,
    InfillBody,
    MessagesBody,
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    ResponseBody,
    parse_body,
)
from fastdeploy_sd.entrypoints.openai.tokenization import Tokenization
from fastdeploy_sd.errors import BadRequest, FdsdError
from fastdeploy_sd.process.sandbox_worker import Handle, Note, Setup, memory_limit
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.request_defaults import read_request_defaults
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import Adapter, ModelInfo
from fastdeploy_sd.wire.codec import pack, unpack
from fastdeploy_sd.wire.http.error_format import to_json
from fastdeploy_sd.wire.http.model_names import ModelNames

MemoryLimit = Callable[[int], AbstractContextManager[object]]

BodyType = TypeVar("BodyType", bound=GenerationBody)

CHAT, COMPLETION, RESPONSE, MESSAGE = "chat", "completion", "response", "message"
OLLAMA_CHAT, OLLAMA_GENERATE, SHOW = "ollama chat", "ollama generate", "show"
INFILL = "infill"
EMBED, OLLAMA_EMBED, OLLAMA_EMBEDDINGS = "embed", "ollama embed", "ollama embeddings"
TOKENIZE, DETOKENIZE, COUNT = "tokenize", "detokenize", "count"
# What reading a body may take, per byte: its bytes, its values, and the lists in which they are collected.
_GROWTH = 20
_MIN_GROWTH_BYTES = 64 << 20
_MAX_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Given:
    """A body, and the adapters that it may name."""

    content: bytes
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a call; exactly one of the five is set.

    Attributes:
        answer: JSON of the answer to a request that needs no engine.
        failure: a traceback of ours, for the log.
        needs_worker: a worker process has to do it, as its size does not bound the work.
    """

    job: GenerationJob | None = None
    answer: str | None = None
    error: WireError | None = None
    failure: str | None = None
    needs_worker: bool = False


class Preparation:
    """Prepares jobs for one loaded model.

    Args:
        limit: what holds the growth of the process to so many bytes while a body is read.
        verify_grammar: see JobBuilder; None = this is no worker, and compiles nothing.
        note: gets the field whose grammar is compiled; see `sandbox_worker.Note`.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        config: Config,
        model_info: ModelInfo,
        limit: MemoryLimit = nullcontext,
        verify_grammar: VerifyGrammar | None = None,
        note: Note = lambda field: None,
    ) -> None:
        self._limit, self._field = limit, ""
        self._is_local = verify_grammar is None
        names = self._names = ModelNames(config.model.served_names)

        def verify(grammar: str, field: str, forbidden: Collection[int] = ()) -> None:
            self._field = field
            note(field)
            (verify_grammar or _leave_to_worker)(grammar, field, forbidden)
            note("")
            self._field = ""

        jobs = JobBuilder(encoder, model_info, config, verify, names)
        texts = Tokenization(encoder, encoder.tokenizer, model_info, names)
        models = OllamaShow(encoder, config, model_info, names)
        self._tasks: Mapping[str, Callable[[bytes], Outcome]] = {
            CHAT: lambda content: self._prepare(ChatCompletionBody, content, jobs.build_chat),
            COMPLETION: lambda content: self._prepare(CompletionBody, content, jobs.build_completion),
            RESPONSE: lambda content: self._prepare(ResponseBody, content, jobs.build_response),
            MESSAGE: lambda content: self._prepare(MessagesBody, content, jobs.build_message),
            OLLAMA_CHAT: lambda content: self._prepare(OllamaChatBody, content, jobs.build_ollama),
            OLLAMA_GENERATE: lambda content: self._prepare(OllamaGenerateBody, content, jobs.build_ollama),
            INFILL: lambda content: self._prepare(InfillBody, content, jobs.build_infill),
            EMBED: lambda content: _embedded(jobs, EmbeddingBody, content),
            OLLAMA_EMBED: lambda content: _embedded(jobs, OllamaEmbedBody, content),
            OLLAMA_EMBEDDINGS: lambda content: _embedded(jobs, OllamaEmbeddingsBody, content),
            SHOW: lambda content: Outcome(answer=to_json(models.show(content))),
            COUNT: lambda content: _counted(jobs, content),
            TOKENIZE: lambda content: Outcome(answer=to_json(texts.tokenize(content))),
            DETOKENIZE: lambda content: Outcome(answer=to_json(texts.detokenize(content))),
        }

    def run(self, name: str, given: Given) -> Outcome:
        """Run a task by its name; whatever happens is in the outcome."""
        self._field, self._names.adapters = "", given.adapters
        try:
            verify_shape(given.content)
            return self._tasks[name](given.content)
        except FdsdError as error:
            error.message = error.message[:_MAX_ERROR_CHARS]
            return Outcome(error=WireError.of(error))
        except _NeedsWorkerError:
            return Outcome(needs_worker=True)
        except MemoryError:
            return Outcome(error=WireError.of(too_complex("memory", self._field)))
        except Exception:
            return Outcome(failure=traceback.format_exc())

    def _prepare(
        self, body_type: type[BodyType], content: bytes, build: Callable[[BodyType], GenerationJob]
    ) -> Outcome:
        with self._limit(max(_GROWTH * len(content), _MIN_GROWTH_BYTES)):
            body = parse_body(body_type, content)
        if isinstance(body, OllamaBody) and body.is_load:
            model = self._names.resolve(body.model)
            return Outcome(answer=to_json(loaded_answer(model, time.time(), isinstance(body, OllamaChatBody))))
        if body.all_asked and self._is_local:
            raise _NeedsWorkerError
        try:
            return Outcome(job=build(body))
        except BadRequest as error:
            raise body.as_sent(error) from None


def _counted(jobs: JobBuilder, content: bytes) -> Outcome:
    body = parse_body(CountTokensBody, content)
    try:
        return Outcome(answer=to_json({"input_tokens": len(jobs.message_prompt(body))}))
    except BadRequest as error:
        raise body.as_sent(error) from None


def _embedded(jobs: JobBuilder, body_type: type[EmbeddingsBody], content: bytes) -> Outcome:
    body = parse_body(body_type, content)
    try:
        return Outcome(job=jobs.build_embedding(body))
    except BadRequest as error:
        raise body.as_sent(error) from None


class _NeedsWorkerError(Exception):
    """The work is not bounded by the size of the body."""


def _leave_to_worker(grammar: str, field: str, forbidden: Collection[int] = ()) -> None:
    raise _NeedsWorkerError


def load(config: str) -> Setup:
    """Load what workers share; see `sandbox_worker.Loader`.

    Raises:
        CheckpointError: the tokenizer's files, the chat template or generation_config.json are not valid.
        ConfigError: the tokenizer backend is not installed.
    """
    parsed = from_json(config)
    tokenizer = load_tokenizer(*parsed.model.tokenizer_source)
    encoder = PromptEncoder(tokenizer)
    checker = GrammarChecker.of(tokenizer)
    read_request_defaults(*parsed.model.defaults_source)  # for workers to find it read

    def setup(model_info: bytes, note: Note) -> Handle:
        preparation = Preparation(encoder, parsed, unpack(ModelInfo, model_info), memory_limit, checker.verify, note)
        return lambda name, given: pack(preparation.run(name, unpack(Given, given)))

    return setup


def too_complex(what: str, field: str = "") -> BadRequest:
    """Return the error for a request that takes too much `what` to prepare, because of `field` where known."""
    if field:
        text, param = f"{field}: expected what can be compiled", re.split(r"[.\[]", field, maxsplit=1)[0]
    else:
        text, param = "body: expected a request that can be prepared", None
    return BadRequest(f"{text}, got what takes too much {what}", param=param)
