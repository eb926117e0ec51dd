"""The drafting methods: name, needs, and which method may extend the drafts of which. Imports nothing.

Code that must know something of a method asks its entry here and not its name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class DraftSource(enum.IntEnum):
    """Who guessed a draft. The lower-case name is the label in metrics."""

    CUSTOM = 0
    NGRAM = 1
    SUFFIX = 2
    MTP = 3
    HANDED_OVER = 4  # by the instance that computed the prompt, with whatever method it has
    GRAMMAR = 5  # forced by the request's grammar
    PREDICTION = 6  # by the client, as its answer
    DRAFT_MODEL = 7
    EAGLE = 8
    EAGLE3 = 9
    MEDUSA = 10
    HYDRA = 11
    MLP_SPECULATOR = 12
    DFLASH = 13


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """What is to be known of a method without making it.

    Attributes:
        name: in configurations, requests and metrics.
        proposer: ".module:class" of spec_decode, made from (SpeculativeConfig, ProposerContext), and a LoadedDraftModel
            where it needs a model.
        source: of its drafts; None = it makes none.
        keys: of `speculative_config` that only drafting reads, this method among others.
        draft_weights: ".module:function" of models that opens its DraftWeights, given (target's Checkpoint, its
            DecoderConfig, `speculative_config.model`); "" = it has no model of its own.
        draft_model: such a function that builds its DraftModel, given (TargetParts, DraftWeights, QuantScheme,
            WeightPacker, num_steps, TpGroup).
        reads_hidden: whether its model reads hidden rows of the target. Then it runs along with the target; else it
            runs when it drafts, on the tokens since it ran last.
        has_kv: whether that model may have a KV cache. Without one it reads only the newest hidden row.
        auto_key: the boolean key with which a method that chooses draws drafts from the model too. Methods whose model
            is a folder share one: the kind of the folder decides.
        has_own_folder: its model is the folder or hub's repository that `speculative_config.model` names; else it may
            be with the target's weights.
        chooses: it decides step by step which of the server's methods without a model draft, and how much.
        subsumed_by: the method that mostly drafts the same or more, so that one that chooses does not ask both.
        default_num_drafts: drafts per request and step at most, unless configured.
        is_replayable: recorded texts are all it needs.
        extensions: value of `mtp_strategy` -> the method without a model that then extends its drafts.
        implied_strategy: the one that a key which only its method reads asks for.
        file_key: the key that names a file it keeps what it learnt in.
        aliases: names of it that other programs have.
    """

    name: str
    proposer: str
    source: DraftSource | None = None
    keys: Sequence[str] = ()
    draft_weights: str = ""
    draft_model: str = ""
    reads_hidden: bool = False
    has_kv: bool = True
    auto_key: str = ""
    has_own_folder: bool = False
    chooses: bool = False
    subsumed_by: str = ""
    default_num_drafts: int = 1
    is_replayable: bool = False
    extensions: Mapping[str, str] = field(default_factory=dict)
    implied_strategy: str = ""
    file_key: str = ""
    aliases: Sequence[str] = ()

    @property
    def needs_model(self) -> bool:
        """Whether the worker loads a DraftModel for it.

        It drafts only where it is configured; a method without a model drafts on every server that speculates.
        """
        return bool(self.draft_model)


NAIVE = "naive"
DEFAULT_METHOD = "auto"  # where the configuration names none
FOLDER_AUTO_KEY = "auto_with_draft_model"
# Of every method whose drafts a model makes.
_MODEL_KEYS = (
    "num_model_steps", "draft_p_min", "model", "quantization", "draft_head_quantization", "enable_draft_logprob",
    "draft_trees",
)  # fmt: skip
METHODS: Mapping[str, DraftMethod] = {
    method.name: method
    for method in (
        DraftMethod(NAIVE, ".dispatcher:NaiveProposer"),
        DraftMethod(
            "ngram",
            ".methods.ngram:NgramProposer",
            DraftSource.NGRAM,
            keys=("max_ngram_size", "min_ngram_size", "ngram_max_spec_factor", "follow_copies", "draft_trees"),
            subsumed_by="suffix",
            is_replayable=True,
            aliases=("ngram_match",),
        ),
        DraftMethod(
            "suffix",
            ".methods.suffix:SuffixProposer",
            DraftSource.SUFFIX,
            keys=(
                "follow_copies",
                "draft_trees",
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_cache_mb",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_min_token_prob",
                "suffix_decoding_cache_file",
            ),
            is_replayable=True,
            file_key="suffix_decoding_cache_file",
        ),
        DraftMethod(
            "mtp",
            ".model_based.proposer:ModelProposer",
            DraftSource.MTP,
            keys=("mtp_strategy", *_MODEL_KEYS),
            draft_weights=".drafters.mtp_weights:open_mtp_weights",
            draft_model=".drafters.mtp:build_mtp_model",
            reads_hidden=True,
            auto_key="auto_with_mtp",
            extensions={"with_ngram": "ngram", "with_suffix": "suffix"},
            implied_strategy="with_suffix",  # FastDeploy's published example of suffix decoding says "mtp"
            # Each names the MTP layers of one architecture, which the checkpoint does here.
            aliases=("ernie_mtp", "deepseek_mtp", "glm4_moe_mtp", "nextn"),
        ),
        DraftMethod(
            "draft_model",
            ".model_based.proposer:ModelProposer",
            DraftSource.DRAFT_MODEL,
            keys=(*_MODEL_KEYS, "draft_tensor_parallel_size", "translate_tokens"),
            draft_weights=".drafters.draft_decoder_weights:open_draft_decoder",
            draft_model=".drafters.draft_decoder:build_draft_decoder",
            auto_key=FOLDER_AUTO_KEY,
            has_own_folder=True,
            default_num_drafts=5,
        ),
        *(
            DraftMethod(
                name,
                ".model_based.proposer:ModelProposer",
                source,
                keys=_MODEL_KEYS,
                draft_weights=f".drafters.eagle_weights:open_{name}",
                draft_model=f".drafters.eagle:build_{name}",
                reads_hidden=True,
                auto_key=FOLDER_AUTO_KEY,
                has_own_folder=True,
                default_num_drafts=5,
            )
            for name, source in (("eagle", DraftSource.EAGLE), ("eagle3", DraftSource.EAGLE3))
        ),
        DraftMethod(
            "dflash",
            ".model_based.proposer:ModelProposer",
            DraftSource.DFLASH,
            keys=_MODEL_KEYS,
            draft_weights=".drafters.dflash_weights:open_dflash",
            draft_model=".drafters.dflash:build_dflash",
            reads_hidden=True,
            auto_key=FOLDER_AUTO_KEY,
            has_own_folder=True,
            default_num_drafts=7,
        ),
        *(
            DraftMethod(
                name,
                ".model_based.proposer:ModelProposer",
                source,
                keys=(*_MODEL_KEYS, "draft_tensor_parallel_size"),
                draft_weights=f".drafters.heads.{weights}:open_{name}",
                draft_model=f".drafters.heads.chain:build_{name}",
                reads_hidden=True,
                has_kv=has_kv,
                auto_key=FOLDER_AUTO_KEY,
                has_own_folder=True,
                default_num_drafts=3,
            )
            for name, source, weights, has_kv in (
                ("medusa", DraftSource.MEDUSA, "weights", False),
                ("hydra", DraftSource.HYDRA, "weights", True),  # that of Hydra++'s layer
                ("mlp_speculator", DraftSource.MLP_SPECULATOR, "mlp_speculator_weights", False),
            )
        ),
        # Longer drafts brought nothing on any recording; how many are worth their time is decided in every step.
        DraftMethod("auto", ".control.method:AutoMethod", chooses=True, default_num_drafts=32),
    )
}
FOLDER_METHODS = tuple(method.name for method in METHODS.values() if method.has_own_folder)
STRATEGIES = tuple(strategy for method in METHODS.values() for strategy in method.extensions)


def canonical_method(name: str) -> str:
    """Return the method a user's spelling means: any case, other programs' names; others, known or not, as is."""
    lower = name.strip().lower()
    return next((method.name for method in METHODS.values() if lower in method.aliases), lower)


def methods_reading(key: str) -> tuple[DraftMethod, ...]:
    """Return the methods that read a key of `speculative_config`; none where the key is of no method."""
    return tuple(method for method in METHODS.values() if key in method.keys)
