"""Environment variables of FastDeploy that a user may expect to act here. No option is read from the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping

_BUDGET = "drafts are bounded by num_speculative_tokens and max_num_batched_tokens"
_log = logging.getLogger(__name__)

# Variable -> what to use in its place.
UNREAD_VARIABLES: Mapping[str, str] = {
    "SPECULATE_VERIFY_USE_TOPK": "use speculative_config.verify_strategy: greedy",
    "SPECULATE_VERIFY_USE_TARGET_SAMPLING": "speculative_config.verify_strategy is target_match by default",
    "FD_ENABLE_MODEL_LOAD_CACHE": "use packed_weights_cache",
    "SPEC_TOKENUM_THRESHOLD": _BUDGET,
    "INFER_WITH_REFERENCE_TOKENUM_THRESHOLD": _BUDGET,
}


def warn_of_unread_variables(environment: Mapping[str, str]) -> None:
    """Log a warning for each of these variables that is set, as it would otherwise be ignored without a word."""
    for name, instead in UNREAD_VARIABLES.items():
        if name in environment:
            _log.warning("%s: this variable of FastDeploy is not read; %s", name, instead)
