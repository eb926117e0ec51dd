"""DraftCounts -> `choices[].speculate_metrics` under FastDeploy's names. Knows no request and no response."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.types import DraftCounts


def speculate_metrics(counts: DraftCounts, method: str, is_lossy: bool) -> dict[str, Any]:
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
        method: who drafted.
        lossy: whether the server's verification may have changed the tokens.
    """
    num_verified, num_accepted = sum(counts.drafted), sum(counts.accepted)
    return {
        "accepted_tokens": num_accepted,
        "rejected_tokens": num_verified - num_accepted,
        "accept_ratio": _ratio(num_accepted, num_verified),
        "average_accept_length": _ratio(counts.num_emitted, counts.num_verifications),
        "accepted_tokens_per_head": list(counts.accepted),
        "accept_ratio_per_head": [_ratio(*pair) for pair in zip(counts.accepted, counts.reached, strict=True)],
        "method": method,
        "lossy": is_lossy,
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
