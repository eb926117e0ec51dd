"""Where a decoder's long sums are cut: the one place with the rules. Knows sizes, no tensors.

The slices follow from the model alone, not from the number of ranks: see parallel/ranges.py.
"""

from __future__ import annotations

from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.parallel.ranges import COUNTS, SliceRule

# Changes when the rules below do: weights that were packed by others are packed anew.
RULES_VERSION = 1
# Inputs that are quantised together, so that cutting a wide sum changes no scale.
_WIDE, _WIDE_UNIT = 512, 128


def attention_slices(config: DecoderConfig) -> SliceRule:
    """Return how the sum over the heads of the attention output projection is cut: at heads, KV heads with theirs."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % 4 == 0 and (kv_heads % 4 == 0 or kv_heads in (1, 2)):
        count = 4
    elif heads % 2 == 0 and (kv_heads % 2 == 0 or kv_heads == 1):
        count = 2
    else:
        count = 1
    return SliceRule(count, heads * config.head_dim // count)


def feed_forward_slices(size: int) -> SliceRule:
    """Return how the sum over the inner width of a feed-forward network is cut."""
    if size >= _WIDE and size % _WIDE_UNIT == 0:
        return SliceRule(4, _WIDE_UNIT)
    count = max(count for count in COUNTS if size % count == 0)
    return SliceRule(count, size // count)
