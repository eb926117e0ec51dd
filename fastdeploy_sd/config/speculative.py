"""The values of `speculative_config`: how drafts are made and verified. Each key is declared once, with its limits.

Single values are checked when the section is constructed; rules between keys are in speculative_map.py, so that tests
may construct unusual combinations on purpose. Knows no proposer and no verification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fastdeploy_sd.config.option import Option, Spec, option, options_of, verify_fields
from fastdeploy_sd.types.draft_methods import (
    DEFAULT_METHOD,
    FOLDER_METHODS,
    METHODS,
    STRATEGIES,
)

SPECULATIVE_OPTION = "speculative_config"
_MOST_BY_DEFAULT = METHODS[DEFAULT_METHOD].default_num_drafts


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made and verified. `naive` makes none: plain decoding on the same path.

    Made without values it is plain decoding; what holds where a user says nothing is `read_speculative(None)`. Raises
    ConfigError: a value has another type than declared or is out of its limits.
    """

    option_group: ClassVar[str] = SPECULATIVE_OPTION

    method: str = option(
        "naive",
        Spec(
            "Where drafts come from; `naive` makes none, `auto` chooses between `ngram` and `suffix`, and how many."
            " Upper case is accepted, and `ngram_match`.",
            choices=tuple(METHODS),
            default_text=f"`{DEFAULT_METHOD}`",
        ),
    )
    num_speculative_tokens: int = option(
        0,
        Spec(
            "Drafts per request and step at most (k), fewer where many requests share a step; `naive` makes 0 whatever"
            " is given, others need at least 1.",
            minimum=0,
            default_text="`1`; for `mtp` alone a given `num_model_steps`; for `draft_model` and EAGLE 5; for"
            f" `dflash` 7; for other heads 3; for `auto` {_MOST_BY_DEFAULT}, or what `max_num_batched_tokens` leaves"
            " room for",
        ),
    )
    mtp_strategy: str = option(
        "default",
        Spec(
            "What extends the drafts of MTP, up to k; `default`: nothing.",
            choices=("default", *STRATEGIES),
            default_text="`default`; with a `suffix_decoding_*` key `with_suffix`",
        ),
    )
    num_model_steps: int = option(
        1,
        Spec(
            "Drafts that a model makes one after another: k where it drafts alone, fewer in a hybrid or with"
            " `draft_trees`; for `auto` at most so many.",
            minimum=1,
            default_text="`1`; where a model drafts alone `num_speculative_tokens`; for `auto` with MTP 3, with another"
            " drafter 5",
        ),
    )
    auto_with_mtp: bool = option(
        False,
        Spec(
            "Whether `auto` has MTP among its sources. The layers take memory, and prompts take the time of one layer"
            " more for each.",
            default_text="`false`; `true` with `num_model_steps` or `model`, unless `auto_with_draft_model`",
        ),
    )
    auto_with_draft_model: bool = option(
        False,
        Spec("Whether `auto` has the drafter in `model` among its sources; not with `auto_with_mtp`."),
    )
    draft_method: str | None = option(
        None,
        Spec(
            "Which method the drafter in `model` is of, with `auto_with_draft_model`.",
            choices=FOLDER_METHODS,
            default_text="what the files in `model` are",
        ),
    )
    draft_p_min: float = option(
        0.0,
        Spec(
            "A chain of a model's drafts ends before the first one with a smaller probability. 0: never.",
            minimum=0,
            maximum=1,
        ),
    )
    model: str | None = option(
        None,
        Spec(
            "Directory of the MTP weights; folder or hub name of another drafter, for `draft_model` also a GGUF"
            " file; `demo/eagle3` and others for the demo model.",
            default_text="of MTP: `mtp` in the model's directory if there is one, else the model's own files",
        ),
    )
    quantization: Literal["none", "wint8", "wint4"] | None = option(
        None,
        Spec(
            "Format of the linear weights of the MTP layers or the drafter; `none`: unquantised. Changes which"
            " drafts are made, as that of the head does.",
            default_text="the model's, and `wint8` for what is unquantised there",
        ),
    )
    draft_head_quantization: Literal["auto", "target", "wint8", "wint4"] = option(
        "auto",
        Spec(
            "Format of the output head that drafts are chosen with: the drafter's own, else a copy of the model's;"
            " auto: wint4; target: as `quantization` says, without a copy. Changes which drafts are made, and so"
            " how many are accepted."
        ),
    )
    translate_tokens: bool = option(
        False,
        Spec(
            "Whether a draft model may have another tokenizer than the target: it drafts the tokens that both have, and"
            " reads others as the longest of its own that they end with."
        ),
    )
    draft_tensor_parallel_size: int | None = option(
        None,
        Spec(
            "Ranks that share the draft model out: all, or 1, which has it whole. Others then wait while it drafts.",
            minimum=1,
            default_text="`tensor_parallel_size`",
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
            "Where the text copies itself at length, n-gram and suffix go on with that copy after changed tokens, and"
            " n-gram prefers it to later places that look the same; false: the text's end alone decides."
        ),
    )
    draft_trees: bool = option(
        False,
        Spec(
            "Whether methods draft several continuations of a text, as a tree of at most `num_speculative_tokens`"
            " tokens; `auto` makes one tree of the drafts of all its sources."
        ),
    )
    draft_top_k: int = option(
        4,
        Spec(
            "With `draft_trees`: how many of a model's most likely tokens are drafted at each place of its chain, at"
            " most. 1: a chain.",
            minimum=1,
            maximum=16,
        ),
    )
    suffix_decoding_max_tree_depth: int = option(
        64, Spec("Longest context that is distinguished, in tokens.", minimum=2, maximum=4096)
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
        0.1,
        Spec(
            "Drafting stops where the drafts are together less probable than this.",
            minimum=0,
            maximum=1,
            default_text="`0.1`; with `draft_trees` `0.01`",
        ),
    )
    suffix_decoding_cache_file: str | None = option(
        None,
        Spec("File of kept outputs, with the ends of their prompts: loaded at start if it exists, saved at shutdown."),
    )
    verify_strategy: Literal["target_match", "greedy", "topp"] = option(
        "target_match",
        Spec(
            "Which drafts are accepted: those that plain decoding would draw; the most likely token; or, lossy, any"
            " token that top-p sampling might draw."
        ),
    )
    accept_policy: Literal["normal", "accept_all", "reject_all"] = option(
        "normal", Spec("`accept_all` (lossy) and `reject_all` ignore the drafts; for measurements.")
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
    def extended_by(self) -> str | None:
        """The method that extends the configured one's drafts, if any does."""
        return METHODS[self.method].extensions.get(self.mtp_strategy) if self.method in METHODS else None

    @property
    def model_top_k(self) -> int:
        """How many tokens a model drafts at each place of its chain; 1 where a method that extends needs a chain."""
        return self.draft_top_k if self.draft_trees and self.extended_by is None else 1

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Names of the methods whose draft model is loaded.

        The configured method, or those that a method which chooses may draw from: it draws from the first, and requests
        may choose any.
        """
        method = METHODS.get(self.method)
        if method is None or not method.chooses:
            return (self.method,) if method is not None and method.needs_model else ()
        asked = [m for m in METHODS.values() if m.auto_key and getattr(self, m.auto_key)]
        folder_method = self.draft_method or FOLDER_METHODS[0]
        return tuple(m.name for m in asked if not m.has_own_folder or m.name == folder_method)

    @property
    def label(self) -> str:
        """The method in names of files and rows of tables: a hybrid is "mtp-ngram", and auto with MTP "auto-mtp"."""
        more = [name for name in (*self.draft_models, self.extended_by) if name not in (None, self.method)]
        return "-".join([self.method, *filter(None, more)])


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
