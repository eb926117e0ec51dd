"""One HTTP generation request, prepared; the n sequences of prompt p are choices p*n .. p*n + n-1 of the response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from fastdeploy_sd.cluster.route import Progress
from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.answer_forms import AnswerForms
from fastdeploy_sd.entrypoints.openai.answer_options import AnswerOptions
from fastdeploy_sd.entrypoints.openai.protocol import (
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    MessagesBody,
    ResponseBody,
)
from fastdeploy_sd.entrypoints.openai.tool_calling import offered_tools
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.grammar import grammar_of
from fastdeploy_sd.text.output_processor import OutputProcessor
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.request_builder import RequestBuilder, RequestGroup
from fastdeploy_sd.text.request_defaults import read_request_defaults
from fastdeploy_sd.text.speculation import may_change_tokens, verify_has_draft_logprobs
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import KvSource, ModelInfo, TokenLogprob
from fastdeploy_sd.types.draft_methods import NAIVE
from fastdeploy_sd.wire.http.auth import BY_KEY
from fastdeploy_sd.wire.http.model_names import resolve_model

# Every sequence of a job costs a task and a buffer for its output, whether it runs or waits for its turn.
MAX_SEQUENCES = 1024
# Each takes about 100 bytes until it is sent, and the text of an answer as much again.
MAX_LOGPROBS_OUTPUT = 1 << 22
# The last events of a Response have them so many times.
_NUM_REPEATS = 4


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A prepared generation request.

    Attributes:
        created: seconds since the epoch.
        echoed_texts: per prompt, the text as given, None when it was given as token ids; empty unless it is echoed.
        method: that drafts for its requests, "naive" = none.
        is_lossy: verification may give its requests tokens that plain decoding would not.
        progress: what the client has got of it from another instance; None = nothing.
        engine: of the server, that runs its requests; None = any.
    """

    job_id: str
    created: int
    model: str
    echoed_texts: tuple[str | None, ...]
    requests: RequestGroup
    method: str
    is_lossy: bool
    answer: AnswerOptions
    progress: Progress | None = None
    engine: int | None = None

    @property
    def reports_speculation(self) -> bool:
        """Whether each choice says what drafting did; never on a server that decodes plainly."""
        return self.method != NAIVE or self.is_lossy

    @property
    def reports_metrics(self) -> bool:
        """Whether the response shows anything that the engine measured."""
        return self.answer.collects_metrics or self.reports_speculation or self.has_prediction

    @property
    def has_prediction(self) -> bool:
        """Whether the client said what the answer is expected to be."""
        return len(self.requests.prediction_token_ids) > 0

    def echoed_text_of(self, choice: int) -> str | None:
        """Return the prompt text of a choice, None when it was given as token ids."""
        return self.echoed_texts[choice // self.requests.sampling.n]

    def prompt_token_ids_of(self, choice: int) -> list[int]:
        """Return the prompt's token ids of a choice."""
        token_ids: list[int] = self.requests.prompt_of(choice).tolist()
        return token_ids

    @property
    def unfinished_choices(self) -> list[int]:
        """The choices that the client has not got to the end."""
        shown = self.progress.choices if self.progress is not None else ()
        return [i for i in range(len(self.requests)) if not (shown and shown[i].is_finished)]

    @property
    def owes_usage(self) -> bool:
        """Whether the client waits for a chunk with the usage of its stream."""
        return self.answer.includes_usage and not (self.progress is not None and self.progress.is_counted)

    @property
    def begun_choices(self) -> set[int]:
        """The choices of which the client has got anything."""
        shown = self.progress.choices if self.progress is not None else ()
        return {i for i, choice in enumerate(shown) if choice.token_ids or choice.is_finished}

    def shown_text_of(self, choice: int, tokenizer: Tokenizer) -> str:
        """Return the text of a choice that another instance has shown the client."""
        return self.shown_of(choice, tokenizer)[0]

    def shown_logprobs_of(self, choice: int) -> tuple[TokenLogprob, ...] | None:
        """Return those of the tokens after that text, None where the request does not ask for any."""
        if self.requests.sampling.logprobs is None:
            return None
        return () if self.progress is None else self.progress.choices[choice].logprobs

    def shown_of(self, choice: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Return that text, and for each token after it where the token's text starts."""
        if self.progress is None:
            return "", []
        processor = OutputProcessor(self.requests[choice], tokenizer, self.answer.shown_ids)
        return processor.shown_text, processor.shown_offsets

    def of_client(self, name: str) -> Self:
        """Return the job with its client's name, see client_of; the body's user counts before an address."""
        user = self.requests.client
        if user and not name.startswith(BY_KEY):
            name = f"user {user}"
        return replace(self, requests=replace(self.requests, client=name))

    def routed(self, kv_source: KvSource | None, progress: Progress | None, engine: int | None = None) -> Self:
        """Return the job as a router wants it: with others' KV, continuing after what another instance has sent, at one
        of several engines. Should that be lost, it is the router which has the stream go on elsewhere.

        Raises BadRequest: the progress is not one of this job.
        """
        requests = replace(self.requests, kv_source=kv_source)
        if progress is None:
            return replace(self, requests=requests, engine=engine)
        counts = len(progress.choices), len(progress.seeds)
        expected = len(requests), len(requests.prompts)
        if counts != expected or not self.answer.stream:
            raise BadRequest(
                f"progress: expected that of a stream with {expected[0]} choices and {expected[1]} seeds, got one with"
                f" {counts[0]} and {counts[1]}"
            )
        requests = replace(
            requests,
            request_id=progress.job_id,
            seeds=progress.seeds,
            output_token_ids=tuple(np.array(choice.token_ids, np.int32) for choice in progress.choices),
        )
        return replace(
            self,
            job_id=progress.job_id,
            created=progress.created,
            requests=requests,
            progress=progress,
            engine=engine,
        )


class VerifyGrammar(Protocol):
    """See GrammarChecker.verify."""

    def __call__(self, grammar: str, field: str, forbidden: Collection[int] = (), /) -> None: ...


class JobBuilder:
    """Prepares jobs for one loaded model. Slow for long prompts (it tokenizes): call it in a worker thread."""

    def __init__(
        self, encoder: PromptEncoder, model_info: ModelInfo, config: Config, verify_grammar: VerifyGrammar
    ) -> None:
        """Prepare jobs; `verify_grammar` gets a grammar and the field that asks for it, and raises BadRequest."""
        self._encoder = encoder
        self._defaults = read_request_defaults(config.model.generation_config, config.model.path)
        self._verify_grammar = verify_grammar
        self._requests = RequestBuilder(encoder, model_info, config.model.seed, self._defaults.max_tokens)
        self._speculation = model_info.speculation
        self._served_names = config.model.served_names
        self._rule = config.speculative
        self._forms = AnswerForms(encoder, config, self._requests.eos_token_ids, verify_grammar)

    def build_chat(self, body: ChatCompletionBody) -> GenerationJob:
        """Return the job of a chat completion.

        Raises BadRequest: the conversation cannot be rendered, or a check against the model's sizes fails.
        """
        params = body.sampling_params(self._defaults.sampling)
        max_tokens = self._requests.max_prompt_tokens
        if body.prompt_token_ids is not None:
            token_ids = body.prompt_token_ids
        elif body.disable_chat_template:
            token_ids = self._encoder.encode_text(body.messages[0].content or "", max_tokens)
        else:
            messages = [message.as_turn() for message in body.messages]
            offered = offered_tools(body.tool_use)
            variables = body.template_variables()
            token_ids = self._encoder.encode_chat(messages, variables, max_tokens, offered, body.prompt_end)
        job_id, prediction = _job_id(body, "chatcmpl-"), body.prediction or ""
        return self._build(body, params, job_id, [token_ids], prediction=prediction)

    def build_completion(self, body: CompletionBody) -> GenerationJob:
        """Return the job of a text completion.

        Raises BadRequest: there are more sequences than a job may have, or a check against the model's sizes fails.
        """
        params = body.sampling_params(self._defaults.sampling)
        num_sequences = len(body.prompts) * params.n
        if num_sequences > MAX_SEQUENCES:
            raise BadRequest(
                f"n: expected at most {MAX_SEQUENCES} sequences (prompts times n), got {num_sequences}", param="n"
            )
        prompts = [self._encoded(p) if isinstance(p, str) else p for p in body.prompts]
        texts = [p if isinstance(p, str) else None for p in body.prompts] if body.echo else []
        return self._build(body, params, _job_id(body, "cmpl-"), prompts, texts)

    def build_response(self, body: ResponseBody) -> GenerationJob:
        """Return the job of a Response. Raises BadRequest: as build_chat."""
        offered, max_tokens = offered_tools(body.tool_use), self._requests.max_prompt_tokens
        token_ids = self._encoder.encode_chat(body.turns, body.template_variables(), max_tokens, offered)
        params = body.sampling_params(self._defaults.sampling)
        return self._build(body, params, _job_id(body, "resp_"), [token_ids])

    def build_message(self, body: MessagesBody) -> GenerationJob:
        """Return the job of a Message. Raises BadRequest: as build_chat."""
        params = body.sampling_params(self._defaults.sampling)
        return self._build(body, params, _job_id(body, "msg_"), [self.message_prompt(body)])

    def message_prompt(self, body: MessagesBody) -> list[int]:
        """Return the prompt of a Message. Raises BadRequest: as build_chat."""
        offered, max_tokens = offered_tools(body.tool_use), self._requests.max_prompt_tokens
        return self._encoder.encode_chat(body.turns, body.template_variables(), max_tokens, offered, body.prompt_end)

    def _build(
        self,
        body: GenerationBody,
        params: SamplingParams,
        job_id: str,
        prompts: list[list[int]],
        echoed_texts: Sequence[str | None] = (),
        *,
        prediction: str = "",
    ) -> GenerationJob:
        if body.include_draft_logprobs:
            verify_has_draft_logprobs(self._speculation, "include_draft_logprobs")
        speculation = body.speculation_options(params)
        salt, user = body.cache_salt or "", body.user or body.safety_identifier or ""
        requests = self._requests.build(prompts, params, job_id, body.priority or 0, salt, speculation)
        answer, grammar = self._forms.of(body, params, prompts[0], self._asked_grammar(body))
        if grammar and (forbidden := {word[0] for word in requests.bad_words_token_ids if len(word) == 1}):
            self._verify_grammar(grammar, "bad_words", forbidden)
        requests = self._requests.with_prediction(replace(requests, grammar=grammar, client=user), prediction)
        limit = MAX_LOGPROBS_OUTPUT // (_NUM_REPEATS if isinstance(body, ResponseBody) else 1)
        names = ("logprobs", "prompt_logprobs")
        asked = [name for name in names if getattr(params, name) is not None]
        num_entries = requests.num_entries(sum(requests.max_tokens) * params.n)
        if asked and num_entries > limit:
            raise BadRequest(
                f"{asked[0]}: expected at most {limit} of them (sequences times max_tokens, and prompt tokens where"
                f" those are asked for, times alternatives and one), got {num_entries}",
                param=asked[0],
            )
        granted = requests.speculation
        return GenerationJob(
            job_id=job_id,
            created=int(time.time()),
            model=resolve_model(body.model, self._served_names),
            echoed_texts=tuple(echoed_texts),
            requests=requests,
            method=self._speculation.method_of(granted),
            is_lossy=may_change_tokens(granted, params.temperature, self._speculation, self._rule),
            answer=answer,
        )

    def _encoded(self, text: str) -> list[int]:
        """Return a prompt's ids; one that is too long is refused before the next ones are encoded."""
        token_ids = self._encoder.encode_text(text, self._requests.max_prompt_tokens)
        self._requests.verify_prompt_length(len(token_ids))
        return token_ids

    def _asked_grammar(self, body: GenerationBody) -> str:
        """Return the grammar of what the body asks of its output; "" = nothing."""
        if not body.all_asked:
            return ""
        [(field, outputs)] = body.all_asked
        grammar = grammar_of(outputs, field)
        self._verify_grammar(grammar, field)
        return grammar


def _job_id(body: GenerationBody, prefix: str) -> str:
    return body.request_id or prefix + uuid.uuid4().hex
