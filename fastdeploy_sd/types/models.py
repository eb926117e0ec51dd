"""What the engine and the frontend know of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.types.draft_methods import METHODS, NAIVE
from fastdeploy_sd.types.kv_description import KvDescription
from fastdeploy_sd.types.kv_groups import KvGroup, most_tokens
from fastdeploy_sd.types.requests import Speculation


@dataclass(frozen=True, slots=True)
class SpeculationInfo:
    """What requests may ask of the loaded drafting methods, and what these ask of the engine.

    Attributes:
        method: of a request that names none. methods: what it may name.
        max_draft_tokens: drafts per request and step at most (k).
        num_lookahead_slots: KV slots from a request's newest token on that drafting writes.
        lossy: verification may emit tokens that plain decoding would not: verify_strategy greedy or topp, for every
            request, or accept_policy accept_all, for those that draft.
        has_draft_logprobs: a request may ask for draft log-probabilities.
    """

    method: str = NAIVE
    methods: tuple[str, ...] = (NAIVE,)
    max_draft_tokens: int = 0
    num_lookahead_slots: int = 0
    lossy: bool = False
    has_draft_logprobs: bool = False

    def keeps_draft_kv(self, method: str) -> bool:
        """Whether a draft model runs along with a request that this method drafts for."""
        return bool(self.draft_model_of(method))

    def draft_model_of(self, method: str) -> str:
        """Name the draft model that runs along with a request that this method drafts for; "" = none.

        The configured method that chooses has the first one; any other without a model has none.
        """
        if self.num_lookahead_slots == 0 or not (method == self.method or METHODS[method].needs_model):
            return ""
        return next((name for name in (method, *self.methods) if METHODS[name].needs_model), method)

    def method_of(self, asked: Speculation) -> str:
        """The method that drafts for a request that asks for this, validated."""
        return (asked.method or self.method) if asked.enabled else NAIVE


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the frontend need to know of a loaded model.

    Attributes:
        fingerprint: the same on instances that give a request the same tokens; "" = not known.
        kv_address: where this instance takes orders for the KV of prompts, "tcp://host:port"; "" = it takes none.
        kv: of a prefill or decode instance; None = of neither.
        weight_bytes, kv_token_bytes: of the weights that a step of one row reads, and of the KV of one token, both on
            one rank; 0 = not known.
        kv_groups: of its layers; () = one group of full attention, with `block_size`.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    speculation: SpeculationInfo = SpeculationInfo()
    fingerprint: str = ""
    kv_address: str = ""
    kv: KvDescription | None = None
    weight_bytes: int = 0
    kv_token_bytes: int = 0
    kv_groups: tuple[KvGroup, ...] = ()

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups of its layers, one at least."""
        return self.kv_groups or (KvGroup(self.block_size),)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request, prompt and output: the last one is never fed back, so its KV is never needed."""
        return min(self.max_model_len, most_tokens(self.groups, self.num_blocks) + 1)
