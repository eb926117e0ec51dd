"""One HTTP generation request, prepared: its prompts, the engine requests they became, and what they cost.

The n sequences of prompt p are choices p*n .. p*n + n-1 of the response. Knows no HTTP.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_sd.config import Config
from fastdeploy_sd.entrypoints.openai.protocol import ChatCompletionBody, CompletionBody, GenerationBody
from fastdeploy_sd.entrypoints.text.chat_template import Message
from fastdeploy_sd.entrypoints.text.output_processor import TextDelta
from fastdeploy_sd.entrypoints.text.prompt import PromptEncoder
from fastdeploy_sd.entrypoints.text.request_builder import RequestBuilder, RequestOptions
from fastdeploy_sd.entrypoints.text.speculation import NAIVE, may_change_tokens, verify_has_draft_logprobs
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import ModelInfo, Request


@dataclass(frozen=True, slots=True)
class Job:
    """A prepared generation request.

    Attributes:
        job_id: id of the response.
        created: seconds since the epoch.
        prompt_texts: per prompt, the text as given; None when it was given as token ids.
        requests: one per choice, in choice order.
        num_choices_per_prompt: n.
        method: who drafts for its requests, "naive" = nobody.
        is_lossy: verification may give its requests tokens that plain decoding would not.
        collects_metrics: each choice reports its request's times.
    """

    job_id: str
    created: int
    model: str
    prompt_texts: tuple[str | None, ...]
    requests: tuple[Request, ...]
    num_choices_per_prompt: int
    method: str
    is_lossy: bool
    collects_metrics: bool

    @property
    def reports_speculation(self) -> bool:
        """Whether each choice says what drafting did; never on a server that decodes plainly."""
        return self.method != NAIVE or self.is_lossy

    @property
    def reports_metrics(self) -> bool:
        """Whether the response shows anything that the engine measured."""
        return self.collects_metrics or self.reports_speculation

    def prompt_text_of(self, choice: int) -> str | None:
        """Return the prompt text behind a choice."""
        return self.prompt_texts[choice // self.num_choices_per_prompt]

    def prompt_token_ids_of(self, choice: int) -> list[int]:
        """Return the prompt's token ids behind a choice."""
        token_ids: list[int] = self.requests[choice].prompt_token_ids.tolist()
        return token_ids


class JobBuilder:
    """Prepares jobs for one loaded model. Slow for long prompts (it tokenizes): call it in a worker thread."""

    def __init__(self, encoder: PromptEncoder, model_info: ModelInfo, config: Config) -> None:
        self._encoder = encoder
        self._requests = RequestBuilder(encoder, model_info, config.model.seed)
        self._speculation = model_info.speculation
        self._model = config.model.served_name
        self._verify_strategy = config.speculative.verify_strategy

    def build_chat(self, body: ChatCompletionBody) -> Job:
        """Return the job of a chat completion.

        Raises:
            BadRequest: the conversation cannot be rendered, or a check against the model's sizes fails.
        """
        text: str | None = None
        if body.prompt_token_ids is not None:
            token_ids = body.prompt_token_ids
        elif body.disable_chat_template:
            text = body.messages[0].content or ""
            token_ids = self._encoder.encode_text(text)
        else:
            messages = [
                Message(m.role, m.content or "", m.name, m.calls, m.tool_call_id, m.reasoning_content)
                for m in body.messages
            ]
            token_ids = self._encoder.encode_chat(messages, body.template_variables())
        return self._build(body, body.sampling_params(), _job_id(body, "chatcmpl-"), [text], [token_ids])

    def build_completion(self, body: CompletionBody) -> Job:
        """Return the job of a text completion.

        Raises:
            BadRequest: a check against the model's sizes fails.
        """
        texts = [p if isinstance(p, str) else None for p in body.prompts]
        token_ids = [self._encoder.encode_text(p) if isinstance(p, str) else p for p in body.prompts]
        return self._build(body, body.sampling_params(), _job_id(body, "cmpl-"), texts, token_ids)

    def _build(
        self,
        body: GenerationBody,
        params: SamplingParams,
        job_id: str,
        texts: list[str | None],
        prompts: list[list[int]],
    ) -> Job:
        if body.include_draft_logprobs:
            verify_has_draft_logprobs(self._speculation, "include_draft_logprobs")
        wish = body.speculation_wish(params)
        requests: list[Request] = []
        for i, token_ids in enumerate(prompts):
            request_id = job_id if len(prompts) == 1 else f"{job_id}-{i}"
            options = RequestOptions(request_id, body.priority or 0, body.cache_salt or "", wish)
            requests += self._requests.build(token_ids, params, options)
        granted = requests[0].speculation  # the same for all
        return Job(
            job_id=job_id,
            created=int(time.time()),
            model=self._model,
            prompt_texts=tuple(texts),
            requests=tuple(requests),
            num_choices_per_prompt=params.n,
            method=self._speculation.method_of(granted),
            is_lossy=may_change_tokens(granted, self._speculation, self._verify_strategy),
            collects_metrics=bool(body.collect_metrics),
        )


def _job_id(body: GenerationBody, prefix: str) -> str:
    return body.request_id or prefix + uuid.uuid4().hex


@dataclass(slots=True)
class UsageCounter:
    """Counts what a job has cost so far."""

    job: Job
    num_completion_tokens: int = 0
    _num_cached: dict[int, int] = field(default_factory=dict)

    def add(self, choice: int, delta: TextDelta) -> None:
        """Take a delta of a choice."""
        self.num_completion_tokens += len(delta.token_ids)
        if choice % self.job.num_choices_per_prompt == 0:  # its siblings only repeat the prompt
            self._num_cached[choice] = max(self._num_cached.get(choice, 0), delta.num_cached_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's `usage`; a prompt counts once however many choices it has."""
        num_prompt_tokens = sum(len(r.prompt_token_ids) for r in self.job.requests[:: self.job.num_choices_per_prompt])
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
