"""One HTTP generation request, prepared; the n sequences of prompt p are choices p*n .. p*n + n-1 of the response."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from fastdeploy_sd.cluster.route import Progress
from fastdeploy_sd.entrypoints.openai.answer_options import AnswerOptions
from fastdeploy_sd.errors import BadRequest, Unavailable
from fastdeploy_sd.text.output_processor import OutputProcessor
from fastdeploy_sd.text.request_builder import RequestGroup
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import KvSource, TokenLogprob
from fastdeploy_sd.types.draft_methods import NAIVE
from fastdeploy_sd.wire.http.auth import BY_KEY


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

    def traced(self, context: str) -> Self:
        """Return the job with the context of its span, for instances that compute a part of it."""
        return replace(self, requests=replace(self.requests, trace_context=context))

    def routed(self, kv_source: KvSource | None, progress: Progress | None, engine: int | None = None) -> Self:
        """Return the job as a router wants it: with others' KV, continuing after what another instance has sent, at one
        of several engines. Should that be lost, it is the router which has the stream go on elsewhere.

        Raises BadRequest: the progress is not one of this job; Unavailable: the adapter here is another.
        """
        requests = replace(self.requests, kv_source=kv_source)
        if progress is None:
            return replace(self, requests=requests, engine=engine)
        if progress.adapter_digest != ("" if requests.adapter is None else requests.adapter.digest):
            text = f"the stream began with another adapter than {self.model!r} is here"
            raise Unavailable(text, code="adapter_changed")
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
