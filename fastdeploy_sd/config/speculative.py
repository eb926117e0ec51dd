"""The values of `speculative_config`: how drafts are made and judged. Each key is declared once, with text and limits.

Single values are checked when the section is constructed; rules between keys are in speculative_map.py, so that tests
may construct unusual combinations on purpose. Knows no proposer and no verification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fastdeploy_sd.config.option import Option, Spec, option, options_of, verify_fields

SPECULATIVE_OPTION = "speculative_config"
METHODS = ("naive", "ngram", "suffix", "mtp")
# Of other programs; each names the MTP layers of one architecture, which the checkpoint does here.
_MTP_ALIASES = ("ernie_mtp", "deepseek_mtp", "glm4_moe_mtp", "nextn")
_METHOD_ALIASES = {"ngram_match": "ngram"} | dict.fromkeys(_MTP_ALIASES, "mtp")
# Known by these names, and not there yet.
UNSUPPORTED_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "hydra", "mlp_speculator", "dflash")


def canonical_method(name: str) -> str:
    """Return the method a user's spelling means: any case, FastDeploy's second name; others, known or not, as is."""
    lower = name.strip().lower()
    return _METHOD_ALIASES.get(lower, lower)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made and judged. `naive` makes none: plain decoding on the same path.

    Attributes:
        method: one of METHODS.
        num_speculative_tokens: drafts per request and step at most (k).
        mtp_strategy: "default"; "with_ngram" or "with_suffix": that method extends what MTP drafted, up to k.
        num_model_steps: drafts of those that MTP itself makes, at most: k where it drafts alone, fewer in a hybrid.
        model: directory of the MTP weights; None = where a checkpoint keeps them.
        quantization: of the MTP layer's linear weights; None = the target's, "none" = unquantised.
        draft_head_quantization: of the output head that drafts are chosen with; "target" = no copy of the target's.
        max_ngram_size, min_ngram_size: lengths of the text's end that n-gram looks up, longest first.
        ngram_max_spec_factor: drafts at most this many times as long as what n-gram matched.
        follow_copies: n-gram and suffix go on with a long copy of earlier text, also behind changed tokens.
        suffix_decoding_max_tree_depth: longest context that suffix decoding tells apart, in tokens.
        suffix_decoding_max_cached_requests: outputs kept for other requests; -1 = only the bytes bound, 0 = none kept.
        suffix_decoding_max_cache_mb: their memory at most, in MiB.
        suffix_decoding_max_spec_factor: drafts at most this many times as long as the matched context.
        suffix_decoding_min_token_prob: drafting stops where the drafts' joint estimated probability falls below it.
        suffix_decoding_cache_file: loaded at start if it exists, saved at shutdown; None = neither.
        verify_strategy, accept_policy, max_candidate_len, verify_window: see sampling.verify.VerifyRule.
        enable_draft_logprob: requests may ask for the log-probabilities of drafts.

    Raises:
        ConfigError: a value has another type than declared or is out of its limits.
    """

    option_group: ClassVar[str] = SPECULATIVE_OPTION

    method: str = option(
        "naive",
        Spec("Where drafts come from; `naive` makes none. Upper case is accepted, and `ngram_match`.", choices=METHODS),
    )
    num_speculative_tokens: int = option(
        0,
        Spec(
            "Drafts per request and step at most (k); `naive` makes 0 whatever is given, others need at least 1.",
            minimum=0,
            default_text="`1`; for `mtp` alone a given `num_model_steps`",
        ),
    )
    mtp_strategy: Literal["default", "with_ngram", "with_suffix"] = option(
        "default",
        Spec(
            "What extends the drafts of MTP, up to k; `default`: nothing.",
            default_text="`default`; beside a `suffix_decoding_*` key `with_suffix`",
        ),
    )
    num_model_steps: int = option(
        1,
        Spec(
            "Drafts that MTP itself makes: k where it drafts alone, fewer in a hybrid.",
            minimum=1,
            default_text="`1`; for `mtp` alone `num_speculative_tokens`",
        ),
    )
    model: str | None = option(
        None,
        Spec(
            "Directory of the MTP weights.",
            default_text="`mtp` in the model's directory if there is one, else the model's own files",
        ),
    )
    quantization: Literal["none", "wint8", "wint4"] | None = option(
        None,
        Spec("Format of the MTP layer's linear weights; `none`: unquantised.", default_text="the model's"),
    )
    draft_head_quantization: Literal["auto", "target", "wint8", "wint4"] = option(
        "auto",
        Spec(
            "Format of the output head that MTP chooses drafts with, a copy of the model's; auto: wint4; target: the"
            " model's own head, without a copy. Changes which drafts are made, and so how many are accepted."
        ),
    )
    max_ngram_size: int = option(5, Spec("Longest end of the text to look up, in tokens.", minimum=1, maximum=64))
    min_ngram_size: int = option(2, Spec("Shortest end of the text to look up, in tokens.", minimum=1, maximum=64))
    ngram_max_spec_factor: float = option(
        2.0, Spec("Drafts at most this many times as long as the matched end of the text.", minimum=0.001)
    )
    follow_copies: bool = option(
        True,
        Spec(
            "Where the text copies itself at length, n-gram and suffix go on with that copy behind changed tokens, and"
            " n-gram prefers it to later places that look the same; false: the text's end alone decides."
        ),
    )
    suffix_decoding_max_tree_depth: int = option(
        64, Spec("Longest context that is told apart, in tokens.", minimum=2, maximum=4096)
    )
    suffix_decoding_max_cached_requests: int = option(
        10_000,
        Spec("Outputs kept to draft from for other requests; -1: bounded by bytes only; 0: none.", minimum=-1),
    )
    suffix_decoding_max_cache_mb: int = option(
        256, Spec("Memory of the kept outputs at most, in MiB.", minimum=1, maximum=1 << 20)
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, Spec("Drafts at most this many times as long as the matched context.", minimum=0.001)
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, Spec("Drafting stops where the drafts are together less probable than this.", minimum=0, maximum=1)
    )
    suffix_decoding_cache_file: str | None = option(
        None, Spec("File of kept outputs: loaded at start if it exists, saved at shutdown.")
    )
    verify_strategy: Literal["target_match", "greedy", "topp"] = option(
        "target_match",
        Spec(
            "Which drafts are accepted: those that plain decoding would draw; the most likely token; or, lossy, any"
            " token that top-p sampling might draw."
        ),
    )
    accept_policy: Literal["normal", "accept_all", "reject_all"] = option(
        "normal", Spec("`accept_all` (lossy) and `reject_all` do not look at the drafts; for measurements.")
    )
    max_candidate_len: int = option(
        5, Spec("How many of the most likely tokens are candidates at most.", minimum=1, maximum=64)
    )
    verify_window: int = option(
        2,
        Spec("Most likely drafts that must follow a second most likely one for it to be kept.", minimum=0, maximum=64),
    )
    enable_draft_logprob: bool = option(False, Spec("Let requests ask for the log-probabilities of drafts."))

    def __post_init__(self) -> None:
        verify_fields(self, "speculative")

    @property
    def label(self) -> str:
        """The method in names of files and rows of tables: a hybrid is "mtp-ngram" or "mtp-suffix"."""
        extension = "" if self.mtp_strategy == "default" else self.mtp_strategy.replace("with_", "-")
        return self.method + extension


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a key has a meaning; elsewhere only its default is accepted.

    Attributes:
        where: for error texts and the documentation.
        holds: whether a configuration is inside.
        subject: the key whose value decides, for error texts.
    """

    where: str
    holds: Callable[[SpeculativeConfig], bool]
    subject: str = "method"


_ANY = Scope("any method", lambda c: True)
# The keys of ngram and suffix too: a request may choose them on any server that drafts.
_DRAFTING = Scope("method ngram, suffix or mtp", lambda c: c.method != "naive")
_MTP = Scope("method mtp", lambda c: c.method == "mtp")
_TOPP = Scope("verify_strategy topp", lambda c: c.verify_strategy == "topp", "verify_strategy")

# FastDeploy's second name of a policy. It is a key but no field, as one fact has one place.
BENCHMARK_MODE = Option(
    name="benchmark_mode",
    section="speculative",
    field_name="accept_policy",
    kind=bool,
    is_optional=False,
    default=False,
    choices=(),
    spec=Spec("The same as `accept_policy: reject_all`."),
    group=SPECULATIVE_OPTION,
)
SPECULATIVE_FIELDS: tuple[Option, ...] = options_of(SpeculativeConfig, "speculative")
SPECULATIVE_KEYS: Mapping[str, Option] = {opt.name: opt for opt in (*SPECULATIVE_FIELDS, BENCHMARK_MODE)}


_SCOPES: Mapping[str, Scope] = {
    "method": _ANY,
    "num_speculative_tokens": _ANY,
    "mtp_strategy": _MTP,
    "num_model_steps": _MTP,
    "model": _MTP,
    "quantization": _MTP,
    "draft_head_quantization": _MTP,
    "max_ngram_size": _DRAFTING,
    "min_ngram_size": _DRAFTING,
    "ngram_max_spec_factor": _DRAFTING,
    "follow_copies": _DRAFTING,
    "verify_strategy": _DRAFTING,
    "accept_policy": _DRAFTING,
    "benchmark_mode": _DRAFTING,
    "max_candidate_len": _TOPP,
    "verify_window": _TOPP,
    "enable_draft_logprob": _MTP,
}


def scope_of(key: str) -> Scope:
    """Return where a key of SPECULATIVE_KEYS has a meaning."""
    if key.startswith("suffix_decoding_"):
        return _DRAFTING
    return _SCOPES[key]
