"""How many multiplications and additions a prompt takes, and how long they take at least on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.hardware import dot_peak
from fastdeploy_sd.config import Config
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder_config import DecoderConfig
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import layer_shapes
from fastdeploy_sd.ops.linear_format import LinearFormat

Operations = Mapping[LinearFormat, int]  # by the format whose instruction does them


def prompt_operations(config: Config, prompt_len: int) -> Operations | None:
    """Return the operations of a model's layers over a prompt: its linear layers, and attention to all earlier tokens.

    A multiplication and an addition count as one each. The head is left out: it is run for one token of a prompt. None
    for a mixture of experts.
    """
    decoder = read_decoder_config(Checkpoint(config.model.path).config)
    scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
    is_int8 = config.cache.kv_cache_dtype == "int8"
    return _operations(decoder, scheme.linear, "wint8" if is_int8 else scheme.dtype, prompt_len)


def least_seconds(operations: Operations) -> float | None:
    """Return the time of so many operations at the peaks of their instructions, measured now; None = not known.

    No op may run meanwhile.
    """
    peaks = {fmt: dot_peak(fmt) for fmt in operations}
    return sum(count / peaks[fmt] for fmt, count in operations.items()) if all(peaks.values()) else None


def _operations(decoder: DecoderConfig, linear: LinearFormat, kv: LinearFormat, prompt_len: int) -> Operations | None:
    if decoder.moe is not None:
        return None
    num_weights = sum(k * n for k, n, _ in layer_shapes(decoder))
    # A token sees the keys up to its own; its head's product with each of them, and with each value.
    num_pairs = prompt_len * (prompt_len + 1) // 2
    counts: Counter[LinearFormat] = Counter()
    counts[linear] += 2 * decoder.num_layers * num_weights * prompt_len
    counts[kv] += 4 * decoder.num_layers * decoder.num_heads * decoder.head_dim * num_pairs
    return counts
