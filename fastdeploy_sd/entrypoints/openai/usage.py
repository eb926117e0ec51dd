"""Counts the tokens of a job for the `usage` of its answer. Knows no HTTP and no engine."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.text.output_processor import TextDelta
from fastdeploy_sd.text.reasoning import ThoughtCounter
from fastdeploy_sd.text.tokenizer import Tokenizer


class UsageCounter:
    """Counts what a job has cost so far, at the instance that had it before too.

    Args:
        job: as it is answered here.
        tokenizer: of the model.
    """

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        requests = job.requests
        self._num_choices_per_prompt = requests.sampling.n
        self._num_prompt_tokens = sum(map(len, requests.prompts))
        shown = () if job.progress is None else job.progress.choices
        self.num_completion_tokens = sum(len(choice.token_ids) for choice in shown)
        self._num_cached: dict[int, int] = {}
        self._known = {i: choice.num_cached_tokens for i, choice in enumerate(shown) if choice.token_ids}
        for choice, num_cached in self._known.items():
            self._add_cached(choice, num_cached)
        self._has_prediction = job.has_prediction
        self._num_predicted = self._num_predicted_accepted = 0
        self._thoughts: list[ThoughtCounter] = []
        if job.answer.reasoning is not None:
            self._thoughts = [ThoughtCounter(job.answer.reasoning) for _ in range(len(requests))]
        for choice in self._known if self._thoughts else ():
            self._thoughts[choice].add(*job.shown_of(choice, tokenizer))

    def add(self, choice: int, delta: TextDelta) -> None:
        """Take a delta of a choice."""
        self.num_completion_tokens += len(delta.token_ids)
        if choice not in self._known:
            self._add_cached(choice, delta.num_cached_tokens)
        if delta.metrics is not None:
            self._num_predicted += delta.metrics.drafts.num_predicted
            self._num_predicted_accepted += delta.metrics.drafts.num_predicted_accepted
        if self._thoughts:
            self._thoughts[choice].add(delta.text, delta.text_offsets)

    def _add_cached(self, choice: int, num_tokens: int) -> None:
        if choice % self._num_choices_per_prompt == 0:  # its siblings only repeat the prompt
            self._num_cached[choice] = max(self._num_cached.get(choice, 0), num_tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of what the model thought, in all choices."""
        return sum(counter.count for counter in self._thoughts)

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's `usage`; a prompt counts once however many choices it has."""
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }
        details = self._details()
        return usage | {"completion_tokens_details": details} if details else usage

    def _details(self) -> dict[str, int]:
        """What the tokens were for, as far as it is told apart."""
        details = {"reasoning_tokens": self.num_reasoning_tokens} if self._thoughts else {}
        if self._has_prediction:
            details["accepted_prediction_tokens"] = self._num_predicted_accepted
            details["rejected_prediction_tokens"] = self._num_predicted - self._num_predicted_accepted
        return details
