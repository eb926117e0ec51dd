"""What the KV of an instance is like, and whether another instance's fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


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

    def __post_init__(self) -> None:
        if not 0 < self.num_layers <= len(self.page_bytes):
            raise ValueError(f"num_layers: expected 1..{len(self.page_bytes)}, got {self.num_layers}")
        if min(self.page_bytes) < 1:
            raise ValueError(f"page_bytes: expected positive numbers, got {min(self.page_bytes)}")


_ALIKE = ("device", "kv_format", "model_fingerprint", "block_size", "num_layers", "num_kv_heads", "head_dim")


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
