"""Counts the tokens of a job for the `usage` of its answer. Knows no HTTP and no engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.text.output_processor import TextDelta
from fastdeploy_sd.text.reasoning import ThoughtCounter
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.types import RequestMetrics


class UsageCounter:
    """Counts what a job has cost so far, at the instance that had it before too."""

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
        self.metrics: list[RequestMetrics] = []  # of the choices that have ended
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
            self.metrics.append(delta.metrics)
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


def metrics_json(metrics: RequestMetrics) -> dict[str, Any]:
    """Times in seconds since the epoch; null for what did not happen or was not reported."""
    times = {name: value or None for name, value in asdict(metrics).items() if name.endswith("_time")}
    return times | {"num_preemptions": metrics.num_preemptions}


def speculate_metrics(metrics: RequestMetrics, method: str, is_lossy: bool) -> dict[str, Any]:
    """Return what drafting did for one sequence; a ratio whose denominator is 0 is 0.

    The engine does not look for stop strings: after one, the steps that it still ran until it was told, usually one,
    count too, and so do the drafts after the stop.

    FastDeploy's fields count drafts only, never the token that verification adds to them:
        accepted_tokens, rejected_tokens: of the drafts verified.
        accept_ratio: accepted / verified.
        average_accept_length: output tokens per step that verified drafts, the added token included; 1 .. k + 1.
        accepted_tokens_per_head: entry i counts the drafts accepted at position i of their step.
        accept_ratio_per_head: accepted at position i / verified there after all before it were accepted.
    Ours:
        tokens_per_step: output tokens per step that gave some, with drafts or without; plain decoding has 1.
        accepted_by_source: of the drafts accepted, each an output token, by who guessed it.
        gain: tokens per second over plain decoding, of all requests in the server's latest steps; only where the method
            runs plain steps to compare with, and has run enough of them.
        method: who drafted.
        lossy: whether the server's verification may have changed the tokens.
    """
    counts = metrics.drafts
    num_verified, num_accepted = sum(counts.drafted), sum(counts.accepted)
    return {
        "accepted_tokens": num_accepted,
        "rejected_tokens": num_verified - num_accepted,
        "accept_ratio": _ratio(num_accepted, num_verified),
        "average_accept_length": _ratio(counts.num_emitted, counts.num_verifications),
        "accepted_tokens_per_head": list(counts.accepted),
        "accept_ratio_per_head": [_ratio(*pair) for pair in zip(counts.accepted, counts.reached, strict=True)],
        "tokens_per_step": metrics.tokens_per_step,
        "accepted_by_source": metrics.accepted_by_source,
        **({"gain": metrics.gain} if metrics.gain else {}),
        "method": method,
        "lossy": is_lossy,
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
