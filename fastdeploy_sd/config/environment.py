"""Environment variables of FastDeploy that a user may expect to act here. No option is read from the environment."""

from __future__ import annotations

from collections.abc import Mapping

from fastdeploy_sd.errors import ConfigError

LOG_DIR_VARIABLE = "FD_LOG_DIR"
LOG_FORMAT_VARIABLE = "FD_LOG_FORMAT"
# Says that multi_api_server is meant; what is started says it too.
_MULTI_SERVER_VARIABLE = "FD_ENABLE_MULTI_API_SERVER"
_PREFIX = "FD_"
_KEYS_VARIABLE = "FD_API_KEY"
_BUDGET = "drafts are bounded by num_speculative_tokens and max_num_batched_tokens"

# Variable -> what to use in its place.
UNREAD_VARIABLES: Mapping[str, str] = {
    "SPECULATE_VERIFY_USE_TOPK": "use speculative_config.verify_strategy: greedy",
    "SPECULATE_VERIFY_USE_TARGET_SAMPLING": "speculative_config.verify_strategy is target_match by default",
    "SPEC_TOKENUM_THRESHOLD": _BUDGET,
    "INFER_WITH_REFERENCE_TOKENUM_THRESHOLD": _BUDGET,
    _KEYS_VARIABLE: "use api_key",
    "FD_DETERMINISTIC_MODE": "tokens never depend on the batch or on timing",
    "FD_DISABLE_CHUNKED_PREFILL": "use enable_chunked_prefill: false",
    "FD_ENABLE_MODEL_LOAD_CACHE": "use packed_weights_cache",
    "FD_MODEL_CACHE": "use download_dir",
    "FD_MODEL_SOURCE": "use model_source",
}


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for the log for each variable that is set and would otherwise be ignored without a word."""
    named = [name for name in UNREAD_VARIABLES if name in environment]
    notes = [f"{name}: this variable of FastDeploy is not read; {UNREAD_VARIABLES[name]}" for name in named]
    known = {*named, LOG_DIR_VARIABLE, LOG_FORMAT_VARIABLE, _MULTI_SERVER_VARIABLE}
    others = [name for name in sorted(environment) if name.startswith(_PREFIX) and name not in known]
    if others:
        notes.append(f"{', '.join(others)}: these variables of FastDeploy are not read")
    return notes


def verify_keys_are_known(environment: Mapping[str, str], has_keys: bool) -> None:
    """Refuse to open an API that FastDeploy would have closed, as the operator who set the variable expects it closed.

    Raises ConfigError: FastDeploy's variable has keys, and no option has.
    """
    if environment.get(_KEYS_VARIABLE) and not has_keys:
        raise ConfigError(
            f"api_key: expected one, as the variable {_KEYS_VARIABLE} is not read here, got none: the API"
            " would be open (if it shall be, unset the variable)",
            param="api_key",
        )
