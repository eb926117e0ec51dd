"""What a rank of tensor parallel has of a decoder: the one place with the rules. Knows sizes, no tensors.

Heads, experts, the inner width of feed-forward networks and the vocabulary are shared out; all else every rank has.
Experts may instead be spread over the ranks of all engines: each rank has whole ones, and computes them for all.
Where a sum runs over what is shared out, its slices follow from the model alone: see types/ranges.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.attention_config import AnyMixer, AttentionConfig, GatedDeltaConfig
from fastdeploy_sd.models.decoder_config import DecoderConfig, DenseConfig, MoeConfig
from fastdeploy_sd.types.ranges import COUNTS, SliceRule, halved
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard

# Changes when the rules below do: weights that were packed by others are packed anew.
RULES_VERSION = 1
# Inputs that are quantised together, so that cutting a wide sum changes no scale.
_WIDE, _WIDE_UNIT = 512, 128
# Outputs that kernels compute together: where no sum is shared out, ranks share out these.
PANEL = 32


@dataclass(frozen=True, slots=True)
class SumPart:
    """The inputs that a rank has of a sum, and how its part is cut."""

    inputs: range
    slices: SliceRule


def attention_slices(attention: AnyMixer) -> SliceRule:
    """Return how the sum over the heads of the output projection is cut: at heads, KV or key heads with theirs."""
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    if heads % 4 == 0 and (kv_heads % 4 == 0 or kv_heads in (1, 2)):
        count = 4
    elif heads % 2 == 0 and (kv_heads % 2 == 0 or kv_heads == 1):
        count = 2
    else:
        count = 1
    return SliceRule(count, attention.q_size // count)


def feed_forward_slices(size: int) -> SliceRule:
    """Return how the sum over the inner width of a feed-forward network is cut."""
    if size >= _WIDE and size % _WIDE_UNIT == 0:
        return SliceRule(4, _WIDE_UNIT)
    count = _largest_count(size)
    return SliceRule(count, size // count)


def expert_slices(num_experts: int) -> SliceRule:
    return SliceRule(_largest_count(num_experts))


def linear_experts(num_experts: int, num_ranks: int) -> tuple[range, ...]:
    """Return the consecutive experts of each rank where they are spread; the counts differ by at most one."""
    bounds = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(bounds))


def spread_experts(num_experts: int, num_ranks: int, num_redundant: int) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each rank before load is known: consecutive ones, then the first ones a second time."""
    slots = linear_experts(num_experts + num_redundant, num_ranks)
    return tuple(tuple(dict.fromkeys(slot % num_experts for slot in own)) for own in slots)


def _largest_count(size: int) -> int:
    return max(count for count in COUNTS if size % count == 0)


class DecoderShard:
    """What a rank has of one decoder.

    `spread`: this rank among those over which experts are spread, which may be of several tensor-parallel groups; None
    = the group shares them out as it does other weights.

    Methods raise ConfigError with the field of config.json where so many ranks cannot share the checkpoint.
    """

    def __init__(self, config: DecoderConfig, shard: Shard = WHOLE_MODEL, spread: Shard | None = None) -> None:
        self._config, self._shard, self._spread = config, shard, spread

    def verify(self) -> None:
        """Check everything that is shared out: what is impossible shows before long work."""
        self.vocabulary()
        for layer in dict.fromkeys(self._config.layers):
            self.attention(layer.attention)
            if isinstance(layer.mlp, DenseConfig):
                self.feed_forward(layer.mlp.intermediate_size)
            else:
                self.experts(layer.mlp)
                if layer.mlp.shared_intermediate_size > 0:
                    self.shared_experts(layer.mlp)

    def attention(self, attention: AnyMixer) -> SumPart:
        """Return the inputs of the output projection that are the rank's heads."""
        rule = attention_slices(attention)
        fields, names = "num_attention_heads, num_key_value_heads", ("query", "KV")
        if isinstance(attention, GatedDeltaConfig):
            fields, names = "linear_num_value_heads, linear_num_key_heads", ("value", "key")
        heads = f"{attention.num_heads} {names[0]} heads over {attention.num_kv_heads} {names[1]} heads"
        self._verify(rule.count, fields, heads)
        return self._part(attention.q_size, rule)

    def heads(self, attention: AnyMixer) -> range:
        """Return the rank's query or value heads."""
        inputs, size = self.attention(attention).inputs, attention.q_size // attention.num_heads
        return range(inputs.start // size, inputs.stop // size)

    def qkvz(self, net: GatedDeltaConfig) -> tuple[range, range, range, range]:
        """Return the rank's rows of the fused q, k, v, z projection of a gated delta net."""
        heads, keys = self.heads(net), self.kv_heads(net)
        q = range(keys.start * net.key_dim, keys.stop * net.key_dim)
        k = range(q.start + net.key_size, q.stop + net.key_size)
        first = 2 * net.key_size
        v = range(first + heads.start * net.value_dim, first + heads.stop * net.value_dim)
        return q, k, v, range(v.start + net.value_size, v.stop + net.value_size)

    def kv_heads(self, attention: AnyMixer) -> range:
        """Return the KV or key heads that the rank's heads read; where there are fewer than ranks, several have one."""
        num_kv_heads, rank, size = attention.num_kv_heads, self._shard.rank, self._shard.size
        begin = rank * num_kv_heads // size
        return range(begin, begin + max(num_kv_heads // size, 1))

    def qkv(self, attention: AttentionConfig) -> tuple[range, range, range]:
        """Return the rank's rows of the fused q, k, v projection."""
        heads, kv_heads = self.attention(attention).inputs, self.kv_heads(attention)
        num_q, num_kv, dim = attention.q_size, attention.kv_size, attention.head_dim
        k = range(num_q + kv_heads.start * dim, num_q + kv_heads.stop * dim)
        return heads, k, range(k.start + num_kv, k.stop + num_kv)

    def feed_forward(self, size: int, field: str = "intermediate_size") -> SumPart:
        """Return the rank's part of the inner width of a dense network; `field` is what config.json calls it."""
        rule = feed_forward_slices(size)
        self._verify(rule.count, field, size)
        return self._part(size, rule)

    def shared_experts(self, moe: MoeConfig) -> SumPart:
        """Return the rank's part of the inner width of the experts that every token uses."""
        return self.feed_forward(moe.shared_intermediate_size, "moe_intermediate_size * moe_num_shared_experts")

    def experts(self, moe: MoeConfig) -> SumPart:
        """Return the rank's experts, and how it cuts the sums that it makes over those of a token."""
        rule = expert_slices(moe.num_experts)
        if self._spread is not None:
            if self._spread.size > moe.num_experts:
                raise ConfigError(
                    f"enable_expert_parallel: expected at most {moe.num_experts} ranks, as the checkpoint's config.json"
                    f" has {moe.num_experts_field}: {moe.num_experts}, got {self._spread.size}",
                    param="enable_expert_parallel",
                )
            return SumPart(linear_experts(moe.num_experts, self._spread.size)[self._spread.rank], rule)
        self._verify(rule.count, moe.num_experts_field, moe.num_experts)
        return self._part(moe.num_experts, rule)

    def vocabulary(self) -> range:
        """Return the tokens whose logits the rank computes."""
        return self._panels(self._config.vocab_size, "vocab_size")

    def hidden(self) -> range:
        """Return the columns of a hidden row that the rank computes where it is no sum over what is shared out."""
        return self._panels(self._config.hidden_size, "hidden_size")

    def _part(self, size: int, rule: SliceRule) -> SumPart:
        rank, num_ranks = self._shard.rank, self._shard.size
        return SumPart(halved(size, num_ranks, rule.unit)[rank], rule.of_rank(num_ranks))

    def _panels(self, size: int, field: str) -> range:
        num_ranks = self._shard.size
        if num_ranks > 1 and size < num_ranks * PANEL:
            raise _error(num_ranks, f"at most {max(size // PANEL, 1)}", field, size)
        return halved(size, num_ranks, PANEL)[self._shard.rank]

    def _verify(self, count: int, field: str, value: object) -> None:
        """A rank has whole subtrees of a sum, so there are at most as many ranks as slices."""
        if count % self._shard.size != 0:
            raise _error(self._shard.size, f"at most {count}", field, value)


def _error(size: int, expected: str, field: str, value: object) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size: expected {expected}, as the checkpoint's config.json has {field}: {value}, got {size}",
        param="tensor_parallel_size",
    )
