"""Which submitted requests are taken: those that can ever run, while the queue has room. Knows limits, no state."""

from __future__ import annotations

from fastdeploy_sd.config import SchedulerConfig
from fastdeploy_sd.engine.stopping import StopRule, find_stop
from fastdeploy_sd.errors import BadRequest, Overloaded, shown
from fastdeploy_sd.rules.requests import RequestRules, context_limit, prompt_too_long, verify_fits
from fastdeploy_sd.types import ModelInfo, Request, Speculation, SpeculationInfo
from fastdeploy_sd.types.draft_methods import NAIVE


class AdmissionRules:
    """Refuses a request at the door instead of leaving it in the queue for ever."""

    def __init__(self, config: SchedulerConfig, model_info: ModelInfo) -> None:
        self._config = config
        self._limit = context_limit(model_info)
        self._speculation = model_info.speculation
        self._rules = RequestRules(model_info.vocab_size, model_info.max_model_len)

    def verify(self, request: Request) -> None:
        """Refuse what would break a step, or could not run even alone."""
        self._rules.verify(request)
        _verify_unended(request)
        _verify_speculation(request.speculation, self._speculation)
        self.verify_feasible(request)

    def verify_feasible(self, request: Request) -> None:
        """Refuse what never fits into the model's context, the KV cache or, without chunked prefill, a step."""
        num_prompt = len(request.prompt_token_ids)
        verify_fits(num_prompt, request.max_tokens, *self._limit)
        budget = self._config.max_num_batched_tokens
        if num_prompt > budget and not self._config.enable_chunked_prefill:
            raise prompt_too_long(budget + 1, num_prompt, "max_num_batched_tokens + 1, as chunked prefill is off")

    def verify_queue(
        self, num_waiting: int, num_waiting_tokens: int, num_prompt: int, *, num_own: int = 0, num_clients: int = 1
    ) -> None:
        """Refuse what the queue has no room for. An empty queue takes any request, or a long one could never run.

        A client with nothing in the queue may add one request although others fill it, up to as many as the limit.

        Args:
            num_own: requests of its client in the queue.
            num_clients: with requests there, this one included.
        """
        max_requests, max_tokens = self._config.max_num_queued_requests, self._config.max_num_queued_tokens
        is_within_share = num_clients > 1 and num_own == 0 and num_prompt <= max_tokens // num_clients
        if num_waiting == 0 or (is_within_share and num_clients <= max_requests):
            return
        if num_waiting >= max_requests:
            raise Overloaded(f"queue: expected fewer than {max_requests} waiting requests, got {num_waiting}")
        if num_waiting_tokens + num_prompt > max_tokens:
            raise Overloaded(
                f"queue: expected at most {max_tokens} waiting prompt tokens, "
                f"got {num_waiting_tokens} and this request's {num_prompt}"
            )


def _verify_unended(request: Request) -> None:
    stop = find_stop(request.output_token_ids.tolist(), 0, StopRule.of(request))
    if stop is not None:
        raise BadRequest(
            f"output_token_ids: expected tokens that have not ended the request, got one that did at {stop.num_tokens}",
            param="output_token_ids",
        )


def _verify_speculation(asked: Speculation, info: SpeculationInfo) -> None:
    method = info.method_of(asked)
    if method not in info.methods:
        raise BadRequest(
            f"speculation.method: expected one of {', '.join(info.methods)}, got {shown(method)}", param="speculation"
        )
    num_drafts = asked.num_speculative_tokens
    if method != NAIVE and num_drafts is not None and not 1 <= num_drafts <= info.max_draft_tokens:
        wanted = f"an integer in 1..{info.max_draft_tokens}"
        raise BadRequest(
            f"speculation.num_speculative_tokens: expected {wanted}, got {shown(num_drafts)}", param="speculation"
        )
    if asked.num_draft_logprobs is not None and not info.has_draft_logprobs:
        raise BadRequest(
            "speculation.num_draft_logprobs: expected none, as nothing here reports any, got "
            f"{asked.num_draft_logprobs}",
            param="speculation",
        )
