"""Prepares jobs from bodies that were parsed, for one loaded model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.answer_forms import AnswerForms
from fastdeploy_sd.entrypoints.openai.answer_options import AnswerOptions, EmbeddingOptions
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.protocol import (
    ChatCompletionBody,
    CompletionBody,
    EmbeddingsBody,
    GenerationBody,
    InfillBody,
    MessagesBody,
    OllamaBody,
    ResponseBody,
)
from fastdeploy_sd.entrypoints.openai.tool_calling import offered_tools
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.grammar import grammar_of
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.request_builder import RequestBuilder
from fastdeploy_sd.text.request_defaults import read_request_defaults
from fastdeploy_sd.text.speculation import may_change_tokens, verify_has_draft_logprobs
from fastdeploy_sd.types import ModelInfo, Pooling
from fastdeploy_sd.types.draft_methods import NAIVE
from fastdeploy_sd.wire.http.model_names import ModelNames

# Every sequence of a job costs a task and a buffer for its output, whether it runs or waits for its turn.
MAX_SEQUENCES = 1024
# Each takes about 100 bytes until it is sent, and the text of an answer as much again.
MAX_LOGPROBS_OUTPUT = 1 << 22
# The last events of a Response have them so many times.
_NUM_REPEATS = 4


class VerifyGrammar(Protocol):
    """See GrammarChecker.verify."""

    def __call__(self, grammar: str, field: str, forbidden: Collection[int] = (), /) -> None: ...


class JobBuilder:
    """Prepares jobs for one loaded model. Slow for long prompts (it tokenizes): call it in a worker thread."""

    def __init__(
        self,
        encoder: PromptEncoder,
        model_info: ModelInfo,
        config: Config,
        verify_grammar: VerifyGrammar,
        names: ModelNames | None = None,
    ) -> None:
        """Prepare jobs; `verify_grammar` gets a grammar and the field that asks for it, and raises BadRequest.

        `names`: what requests may ask for; None = the model only.
        """
        self._encoder = encoder
        self._defaults = read_request_defaults(*config.model.defaults_source)
        self._verify_grammar = verify_grammar
        self._requests = RequestBuilder(encoder, model_info, config.model.seed, self._defaults.max_tokens)
        self._speculation, self._hidden_size = model_info.speculation, model_info.hidden_size
        self._names = names or ModelNames(config.model.served_names)
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
        prompts = [self._encoded(p, body.suffix) if isinstance(p, str) else p for p in body.prompts]
        texts = [p if isinstance(p, str) else None for p in body.prompts] if body.echo else []
        job = self._build(body, params, _job_id(body, "cmpl-"), prompts, texts)
        return self._filling(job) if body.suffix else job

    def _filling(self, job: GenerationJob) -> GenerationJob:
        """Return the job with what ends the middle of a text."""
        ends = tuple(dict.fromkeys((*job.requests.eos_token_ids, *self._encoder.infill_end_ids)))
        return replace(job, requests=replace(job.requests, eos_token_ids=ends))

    def build_infill(self, body: InfillBody) -> GenerationJob:
        """Return the job of what fills a gap. Raises BadRequest: as build_completion."""
        texts, max_tokens = (body.input_prefix, body.input_suffix), self._requests.max_prompt_tokens
        token_ids = self._encoder.encode_infill(*texts, max_tokens, body.extra, body.prompt)
        self._requests.verify_prompt_length(len(token_ids))
        params = body.sampling_params(self._defaults.sampling)
        return self._filling(self._build(body, params, _job_id(body, "infill-"), [token_ids]))

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

    def build_ollama(self, body: OllamaBody) -> GenerationJob:
        """Return the job of a request of Ollama's form. Raises BadRequest: as build_chat."""
        text, max_tokens = body.raw_prompt(self._encoder.has_template), self._requests.max_prompt_tokens
        if text is not None:
            token_ids = self._encoded(text, body.text_after)
        else:
            offered = offered_tools(body.tool_use)
            token_ids = self._encoder.encode_chat(
                body.turns, body.template_variables(), max_tokens, offered, body.prompt_end
            )
        params = self._within_context(body, body.sampling_params(self._defaults.sampling), len(token_ids))
        job = self._build(body, params, _job_id(body, "ollama-"), [token_ids])
        return self._filling(job) if body.text_after else job

    def build_embedding(self, body: EmbeddingsBody) -> GenerationJob:
        """Return the job of embeddings: its prompts are computed, and no token is generated.

        Raises BadRequest: the model makes none, a text is too long, or there are fewer dimensions than asked for.
        """
        size = self._hidden_size
        if size == 0:
            raise BadRequest("embeddings: not supported by what computes this model", code="not_supported")
        if body.dimensions is not None and body.dimensions > size:
            text = f"dimensions: expected at most the {size} of the model, got {body.dimensions}"
            raise BadRequest(text, param="dimensions")
        prompts = [self._embedded_text(text, body.max_tokens) for text in body.texts]
        params = SamplingParams(temperature=0.0, max_tokens=0)
        job_id, priority = "embd-" + uuid.uuid4().hex, body.priority or 0
        model = self._names.resolve(body.model)
        requests = self._requests.build(prompts, params, job_id, priority, speculation={"enabled": False})
        return GenerationJob(
            job_id=job_id,
            created=int(time.time()),
            model=model,
            echoed_texts=(),
            requests=replace(
                requests,
                pooling=body.pooling or Pooling.MEAN,
                client=body.user or "",
                adapter=self._names.adapter_of(model),
            ),
            method=NAIVE,
            is_lossy=False,
            answer=AnswerOptions(collects_metrics=True, embedding=EmbeddingOptions(body.dimensions, body.is_base64)),
        )

    def _embedded_text(self, text: str | list[int], max_tokens: int | None) -> list[int]:
        """Return the tokens of a text, cut to `max_tokens` and what the context holds; None = it is not cut."""
        if max_tokens is None:
            return self._encoded(text) if isinstance(text, str) else text
        token_ids = self._encoder.encode_text(text) if isinstance(text, str) else text
        return token_ids[: min(max_tokens, self._requests.max_prompt_tokens)]

    def _within_context(self, body: OllamaBody, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Return the options with the output cut to fit, as Ollama does; BadRequest: num_ctx leaves no room for it."""
        context = self._requests.max_prompt_tokens + 1
        room = min(body.num_ctx or context, context) - num_prompt_tokens
        if room < 1 and body.num_ctx is not None:
            text = f"expected more than the {num_prompt_tokens} tokens of the prompt, got {body.num_ctx}"
            raise BadRequest(f"options.num_ctx: {text}", param="options", code="context_length_exceeded")
        asked = params.max_tokens or self._defaults.max_tokens or room
        return replace(params, max_tokens=max(1, min(room, asked)))

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
        granted, model = requests.speculation, self._names.resolve(body.model)
        return GenerationJob(
            job_id=job_id,
            created=int(time.time()),
            model=model,
            echoed_texts=tuple(echoed_texts),
            requests=replace(requests, adapter=self._names.adapter_of(model)),
            method=self._speculation.method_of(granted),
            is_lossy=may_change_tokens(granted, params.temperature, self._speculation, self._rule),
            answer=answer,
        )

    def _encoded(self, text: str, suffix: str | None = None) -> list[int]:
        """Return a prompt's ids; one that is too long is refused before the next ones are encoded.

        `suffix`: what follows the output, "" or None = nothing.
        """
        max_tokens = self._requests.max_prompt_tokens
        if suffix:
            token_ids = self._encoder.encode_infill(text, suffix, max_tokens)
        else:
            token_ids = self._encoder.encode_text(text, max_tokens)
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
