"""What the engine and the frontend know of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastdeploy_sd.types.adapters import AdapterSource
from fastdeploy_sd.types.draft_methods import METHODS, NAIVE
from fastdeploy_sd.types.kv_groups import KvGroup, most_tokens
from fastdeploy_sd.types.requests import Speculation


@dataclass(frozen=True, slots=True)
class KvDescription:
    """What two instances must agree on before KV goes from one to the other.

    Attributes:
        device: e.g. "CPU, avx512": another one sums in another order, and lays KV out otherwise.
        model_fingerprint: equal only for the same weights in the same arithmetic.
        block_size: tokens per block.
        kv_format: how keys and values are stored, e.g. "bfloat16" or "int8".
        num_layers, num_kv_heads, head_dim: of the target.
        page_bytes: of a block in each layer, the target's first, then the draft layers.
        draft_fingerprint: as model_fingerprint, of what made the draft layers; "" = there are none.
        windows: of the target's layers whose blocks before the window are not sent; 0 = all are. () = of all layers.
    """

    device: str
    model_fingerprint: str
    block_size: int
    kv_format: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_bytes: tuple[int, ...]
    draft_fingerprint: str = ""
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.num_layers <= len(self.page_bytes):
            raise ValueError(f"num_layers: expected 1..{len(self.page_bytes)}, got {self.num_layers}")
        if min(self.page_bytes) < 1:
            raise ValueError(f"page_bytes: expected positive numbers, got {min(self.page_bytes)}")


_ALIKE = ("device", "kv_format", "model_fingerprint", "block_size", "num_layers", "num_kv_heads", "head_dim", "windows")


@lru_cache(maxsize=1024)
def mismatch(decode: KvDescription, prefill: KvDescription) -> str | None:
    """Return why KV of `prefill` is of no use to `decode`; None when it fits. Unwanted draft layers are not sent."""
    for name in _ALIKE:
        expected, got = getattr(decode, name), getattr(prefill, name)
        if expected != got:
            return _text(name, expected, got)
    num_draft, num_theirs = (len(d.page_bytes) - d.num_layers for d in (decode, prefill))
    if num_draft > num_theirs:
        return _text("draft layers", f"at least {num_draft}", num_theirs)
    if num_draft and decode.draft_fingerprint != prefill.draft_fingerprint:
        return _text("draft_fingerprint", decode.draft_fingerprint, prefill.draft_fingerprint)
    for layer, (expected, got) in enumerate(zip(decode.page_bytes, prefill.page_bytes, strict=False)):
        if expected != got:
            return _text(f"page_bytes of layer {layer}", expected, got)
    return None


def _text(name: str, expected: object, got: object) -> str:
    return f"{name}: expected {expected} as on the decode instance, got {got} on the prefill instance"


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
        """Whether draft layers run along with a request that this method drafts for, so that its blocks have theirs."""
        name = self.draft_model_of(method)
        return bool(name) and METHODS[name].reads_hidden and METHODS[name].has_kv

    def kv_kind(self, method: str) -> str:
        """What the blocks of a request hold that this method drafts for; blocks of different kinds are not shared.

        A name holds no colon, so no salt of a user that follows one turns a kind into another.
        """
        return f"with KV of {self.draft_model_of(method)}" if self.keeps_draft_kv(method) else "target KV only"

    @property
    def kv_kinds(self) -> set[str]:
        """The kinds of blocks that there may be."""
        return {self.kv_kind(method) for method in self.methods}

    def draft_model_of(self, method: str) -> str:
        """Name the draft model of a request that this method drafts for; "" = none.

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
        weight_bytes: of the weights that a step of one row reads. kv_token_bytes: KV that each further token of a long
            request takes and a step reads, in layers without a window. Both on one rank; 0 = not known, or none.
        hidden_size: of the rows that embeddings are made of; 0 = it makes none.
        num_state_snapshots: that the worker keeps of recurrent states; None = the model has no such states.
        adapters: that requests may name now. num_adapter_slots: places for them in memory; 0 = there can be none.
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
    num_state_snapshots: int | None = None
    hidden_size: int = 0
    adapters: tuple[AdapterSource, ...] = ()
    num_adapter_slots: int = 0

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups of its layers, one at least."""
        return self.kv_groups or (KvGroup(self.block_size),)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request, prompt and output: the last one is never fed back, so its KV is never needed."""
        return min(self.max_model_len, most_tokens(self.groups, self.num_blocks) + 1)
