"""Which metrics there are: name, meaning, and how each follows from EngineStats.

Names of FastDeploy start with `fastdeploy:` and keep its meaning, with every ratio over what was really asked or
proposed; a ratio whose denominator is still zero has no sample. Names of our own start with `fastdeploy_sd:`. What
FastDeploy counts and this server does not have (a cache shared by hosts) has no metric rather than a
constant one. Knows no exposition format.
"""

from __future__ import annotations

from fastdeploy_sd.metrics import expert_families, kv_families
from fastdeploy_sd.metrics.adapter_families import ADAPTER_LABELLED_GAUGES
from fastdeploy_sd.metrics.choice_families import CHOICE_GAUGES, CHOICE_LABELLED_COUNTERS, CHOICE_LABELLED_GAUGES
from fastdeploy_sd.metrics.family import ByPosition, Labelled, Single, ratio
from fastdeploy_sd.metrics.grammar_families import GRAMMAR_COUNTERS, GRAMMAR_GAUGES
from fastdeploy_sd.types.stats import EngineStats


def _num_available_blocks(s: EngineStats) -> int:
    return s.num_free_blocks + s.num_cached_blocks


def _num_hit_tokens(s: EngineStats) -> int:
    return s.num_prefix_hit_tokens + s.num_prefix_swap_hit_tokens


def _used_share(s: EngineStats) -> float | None:
    return ratio(s.num_blocks - _num_available_blocks(s), s.num_blocks)


COUNTERS = (
    Single("fastdeploy:requests_number", "Requests taken.", lambda s: s.num_requests),
    Single(
        "fastdeploy:request_success",
        "Requests that ended by a stop token or text or at their length; neither aborted nor failed.",
        lambda s: s.num_finished["stop"] + s.num_finished["length"],
    ),
    Single(
        "fastdeploy:request_preempted",
        "Times a running request lost its KV blocks and was queued again.",
        lambda s: s.num_preemptions,
    ),
    Single("fastdeploy:prompt_tokens", "Prompt tokens of requests with a first token.", lambda s: s.num_prompt_tokens),
    Single("fastdeploy:generation_tokens", "Tokens generated.", lambda s: s.num_generated_tokens),
    Single(
        "fastdeploy:prefix_cache_token_num",
        "Prompt tokens found in the prefix cache, at either level, when a request was first scheduled.",
        _num_hit_tokens,
    ),
    Single(
        "fastdeploy:prefix_gpu_cache_token_num",
        "Of these, found in the KV cache itself, the first level.",
        lambda s: s.num_prefix_hit_tokens,
    ),
    Single(
        "fastdeploy:prefix_cpu_cache_token_num",
        "Of these, loaded from the second level (swap_space).",
        lambda s: s.num_prefix_swap_hit_tokens,
    ),
    Single(
        "fastdeploy:spec_decode_num_draft_tokens",
        "Drafts verified; those after the token that ended a request do not count.",
        lambda s: s.num_draft_tokens,
    ),
    Single("fastdeploy:spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: s.num_accepted_tokens),
    Single(
        "fastdeploy:spec_decode_num_emitted_tokens",
        "Output tokens of verifications that had drafts: the accepted ones and, unless one of these ended the request, "
        "a recovered or bonus token each.",
        lambda s: s.num_emitted_tokens,
    ),
    Single(
        "fastdeploy_sd:spec_decode_verifications",
        "Verifications that had drafts; emitted tokens over these is the mean acceptance length.",
        lambda s: s.num_verified_rows,
    ),
    Single(
        "fastdeploy_sd:generation_steps",
        "Steps that gave a request tokens, over all requests; generated tokens over these are the tokens per step.",
        lambda s: s.num_token_steps,
    ),
    Single(
        "fastdeploy_sd:kv_arrivals",
        "Requests that waited for KV from elsewhere and then went on, with what had come.",
        lambda s: s.num_kv_arrivals,
    ),
    Single(
        "fastdeploy_sd:kv_cancels", "Requests preempted or ended while they waited for KV.", lambda s: s.num_kv_cancels
    ),
    Single("fastdeploy_sd:steps", "Engine steps executed.", lambda s: s.num_steps),
    *kv_families.PREFIX_COUNTERS,
    *kv_families.SWAP_COUNTERS,
    *GRAMMAR_COUNTERS,
    *expert_families.EXPERT_COUNTERS,
    *kv_families.TRANSFER_COUNTERS,
)

GAUGES = (
    Single("fastdeploy:num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    Single("fastdeploy:num_requests_waiting", "Requests in the queue.", lambda s: s.num_waiting),
    Single(
        "fastdeploy:num_requests_preempted",
        "Requests in the queue because they were preempted.",
        lambda s: s.num_preempted_waiting,
    ),
    Single(
        "fastdeploy:num_requests_enqueued",
        "Requests in the queue that have not been scheduled yet.",
        lambda s: s.num_waiting - s.num_preempted_waiting,
    ),
    Single("fastdeploy:batch_size", "Requests in the batch.", lambda s: s.num_running),
    Single("fastdeploy:max_batch_size", "Most requests a batch may hold.", lambda s: s.max_num_seqs),
    Single(
        "fastdeploy:available_batch_size",
        "Requests the batch has room for.",
        lambda s: s.max_num_seqs - s.num_running,
    ),
    Single(
        "fastdeploy:hit_req_rate",
        "Share of requests, at their first scheduling, that found any of their prompt in the prefix cache.",
        lambda s: ratio(s.num_prefix_hits, s.num_prefix_queries),
    ),
    Single(
        "fastdeploy:hit_token_rate",
        "Share of prompt tokens found in the prefix cache, at either level, of all that were looked up.",
        lambda s: ratio(_num_hit_tokens(s), s.num_prefix_query_tokens),
    ),
    Single(
        "fastdeploy:gpu_hit_token_rate",
        "The same of the first level, the KV cache itself.",
        lambda s: ratio(s.num_prefix_hit_tokens, s.num_prefix_query_tokens),
    ),
    Single(
        "fastdeploy:cpu_hit_token_rate",
        "The same of the second level (swap_space).",
        lambda s: ratio(s.num_prefix_swap_hit_tokens, s.num_prefix_query_tokens),
    ),
    Single("fastdeploy:max_gpu_block_num", "KV blocks in all.", lambda s: s.num_blocks),
    Single("fastdeploy:free_gpu_block_num", "KV blocks without content.", lambda s: s.num_free_blocks),
    Single(
        "fastdeploy:available_gpu_block_num",
        "KV blocks a request could get: without content, or cached and unused.",
        _num_available_blocks,
    ),
    Single(
        "fastdeploy:available_gpu_resource",
        "Available KV blocks over all blocks, 0..1.",
        lambda s: ratio(_num_available_blocks(s), s.num_blocks),
    ),
    Single("fastdeploy:gpu_cache_usage_perc", "KV blocks in use by requests over all blocks, 0..1.", _used_share),
    Single(
        "fastdeploy:spec_decode_draft_acceptance_rate",
        "Drafts accepted over drafts verified.",
        lambda s: ratio(s.num_accepted_tokens, s.num_draft_tokens),
    ),
    Single(
        "fastdeploy:spec_decode_efficiency",
        "Tokens emitted by verifications over drafts verified and one token more per verification, which is what they "
        "emit when every draft is accepted and none ends its request.",
        lambda s: ratio(s.num_emitted_tokens, s.num_draft_tokens + s.num_verified_rows),
    ),
    Single(
        "fastdeploy_sd:spec_decode_mean_acceptance_length",
        "Mean tokens per verification that had drafts, 1 = no draft was right.",
        lambda s: ratio(s.num_emitted_tokens, s.num_verified_rows),
    ),
    Single(
        "fastdeploy_sd:num_waiting_tokens",
        "Prompt tokens of the requests in the queue.",
        lambda s: s.num_waiting_tokens,
    ),
    Single(
        "fastdeploy_sd:num_requests_waiting_for_kv",
        "Requests in the batch whose KV is on its way from elsewhere.",
        lambda s: s.num_waiting_for_kv,
    ),
    *CHOICE_GAUGES,
    *kv_families.STATE_GAUGES,
    *kv_families.SWAP_GAUGES,
    *GRAMMAR_GAUGES,
    *expert_families.EXPERT_GAUGES,
)

LABELLED_COUNTERS = (
    Labelled("fastdeploy_sd:requests_finished", "Requests that ended, by reason.", "reason", lambda s: s.num_finished),
    Labelled(
        "fastdeploy_sd:step_time_seconds",
        "Time in engine steps, by phase: batch (preparing), forward (the model), verify (sampling, drafts), "
        "draft (making the next ones); on a GPU verify is the wait for it, and idle how long it had nothing to do.",
        "phase",
        lambda s: {phase: ms / 1000 for phase, ms in s.timings_ms.items()},
    ),
    Labelled(
        "fastdeploy_sd:spec_decode_emitted_tokens_by_method",
        "Output tokens of verifications that had drafts, by the method of the request.",
        "method",
        lambda s: {method: counts.num_emitted for method, counts in s.verifications.items()},
    ),
    Labelled(
        "fastdeploy_sd:spec_decode_verifications_by_method",
        "Verifications that had drafts, by the method of the request.",
        "method",
        lambda s: {method: counts.num_verifications for method, counts in s.verifications.items()},
    ),
    *CHOICE_LABELLED_COUNTERS,
    *kv_families.SWAP_LABELLED_COUNTERS,
    *kv_families.TRANSFER_LABELLED_COUNTERS,
)

BY_LABELS = (*kv_families.TRANSFER_WAYS, *expert_families.EXPERT_ROWS)

# A request has one method; its drafts may have several sources, as a method may extend what another one drafted.
BY_POSITION = (
    ByPosition(
        "fastdeploy_sd:spec_decode_draft_tokens_by_method",
        "Drafts verified, by the method of the request and position (0 = first).",
        "method",
        lambda s: {method: counts.drafted for method, counts in s.verifications.items()},
    ),
    ByPosition(
        "fastdeploy_sd:spec_decode_reached_tokens_by_method",
        "Drafts verified after accepted ones only, by the method of the request and position; accepted over these is "
        "the acceptance of the position by itself.",
        "method",
        lambda s: {method: counts.reached for method, counts in s.verifications.items()},
    ),
    ByPosition(
        "fastdeploy_sd:spec_decode_accepted_tokens_by_method",
        "Drafts accepted, by the method of the request and position.",
        "method",
        lambda s: {method: counts.accepted for method, counts in s.verifications.items()},
    ),
    ByPosition(
        "fastdeploy_sd:spec_decode_draft_tokens_by_source",
        "Drafts verified, by who made the draft and position (0 = first).",
        "source",
        lambda s: {source: counts.drafted for source, counts in s.drafts.items()},
    ),
    ByPosition(
        "fastdeploy_sd:spec_decode_reached_tokens_by_source",
        "Drafts verified after accepted ones only, by who made the draft and position.",
        "source",
        lambda s: {source: counts.reached for source, counts in s.drafts.items()},
    ),
    ByPosition(
        "fastdeploy_sd:spec_decode_accepted_tokens_by_source",
        "Drafts accepted, by who made the draft and position.",
        "source",
        lambda s: {source: counts.accepted for source, counts in s.drafts.items()},
    ),
)

LABELLED_GAUGES = (
    Labelled(
        "fastdeploy_sd:kv_cache_blocks",
        "KV blocks by state: free (no content), cached (reusable content, unused), used (by requests).",
        "state",
        lambda s: {
            "free": s.num_free_blocks,
            "cached": s.num_cached_blocks,
            "used": s.num_blocks - _num_available_blocks(s),
        },
    ),
    Labelled(
        "fastdeploy_sd:spec_decode_mean_acceptance_length_by_method",
        "Mean tokens per verification that had drafts, 1 = no draft was right, by the method of the request.",
        "method",
        lambda s: {
            method: counts.num_emitted / counts.num_verifications
            for method, counts in s.verifications.items()
            if counts.num_verifications
        },
    ),
    *CHOICE_LABELLED_GAUGES,
    *expert_families.EXPERT_LABELLED_GAUGES,
    *ADAPTER_LABELLED_GAUGES,
)

# Name, meaning, key of EngineStats.histograms; over requests that have ended.
HISTOGRAMS = (
    ("fastdeploy:time_to_first_token_seconds", "From a request's arrival to its first token.", "ttft_s"),
    ("fastdeploy:time_per_output_token_seconds", "Mean time per token after a request's first one.", "tpot_s"),
    ("fastdeploy:e2e_request_latency_seconds", "From a request's arrival to its end.", "e2e_s"),
    ("fastdeploy:request_queue_time_seconds", "From a request's arrival to its first scheduling.", "queue_s"),
    ("fastdeploy:request_inference_time_seconds", "From a request's first scheduling to its end.", "inference_s"),
    ("fastdeploy:request_prefill_time_seconds", "From a request's first scheduling to its first token.", "prefill_s"),
    ("fastdeploy:request_decode_time_seconds", "From a request's first token to its end.", "decode_s"),
    ("fastdeploy:request_prompt_tokens", "Prompt tokens per request.", "prompt_tokens"),
    ("fastdeploy:request_generation_tokens", "Generated tokens per request.", "generated_tokens"),
    ("fastdeploy:request_params_max_tokens", "Limit on generated tokens per request.", "max_tokens"),
)
