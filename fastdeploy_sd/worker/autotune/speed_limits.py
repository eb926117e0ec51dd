"""The speed limits of memory and arithmetic on this machine, for a line in the log of a start. Needs no Paddle."""

from __future__ import annotations

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.source import ModelSource
from fastdeploy_sd.ops.roofline import Roofline, measure_roofline

# Beyond the caches of two threads, written and read within 50 ms where memory reads 30 GB/s.
STREAM_BYTES = 128 << 20
NUM_PASSES = 3


def measure_limits(config: Config) -> Roofline:
    """Measure the machine for the format of a configuration: some 50 ms and `STREAM_BYTES` of memory."""
    return measure_roofline((_scheme(config).linear,), STREAM_BYTES, NUM_PASSES)


def describe_limits(roofline: Roofline, num_bytes: int) -> str:
    """Return a line: bandwidth, peak, the most steps per second, and the rows up to which memory is the limit.

    Args:
        roofline: of one format.
        num_bytes: what a step reads, 0 = not known.
    """
    [(fmt, peak)] = roofline.peaks.items()
    parts = [f"memory reads {_rate(roofline.read_bytes_per_s, 'GB/s')}"]
    if num_bytes and roofline.read_bytes_per_s:
        parts[0] += f", at most {roofline.steps_per_s(num_bytes):.0f} steps/s if no cache holds the weights"
    parts.append(f"{fmt} arithmetic reaches {_rate(peak, 'GOP/s')}")
    rows = roofline.free_rows(fmt)
    if rows is not None:
        parts.append(f"memory limits steps of up to {rows} rows, arithmetic larger ones and prompts")
    return "; ".join(parts)


def describe_engines(roofline: Roofline, num_engines: int) -> str:
    """Return a line: up to how many rows per step one engine with all threads is faster than several.

    Reading the weights W takes D engines D * W / B together, as long as n rows' arithmetic for n = D * `free_rows`. One
    engine reads them once: it is faster below that n, by D at most, and as fast from there on, but for what a step
    costs besides.

    Args:
        roofline: of one format, measured with all threads. With those of one engine alone the bandwidth may be more
            than its part, and the number of rows too low.
    """
    [fmt] = roofline.peaks
    rows, text = roofline.free_rows(fmt), f"{num_engines} engines read the weights {num_engines} times per step: "
    if rows is None:
        return text + "for few requests that is slower than one engine with all threads"
    return (
        f"{text}with fewer than about {num_engines * rows} rows in all (running requests, and their drafts), one engine"
        f" with all threads is faster, {num_engines} times as fast up to {rows} rows (less for a mixture of experts)"
    )


def bytes_per_step(config: Config, source: ModelSource) -> int:
    """Return the bytes of weights that a step of one row reads, over all ranks; 0 = not known.

    Raises CheckpointError: as read_decoder_config.
    """
    decoder_config = read_decoder_config(source.config, str(source.config_path))
    weights = DecoderWeights(source, decoder_config) if config.model.keeps_integers else None
    return weight_bytes_per_step(decoder_config, _scheme(config), weights) or 0


def _scheme(config: Config) -> QuantScheme:
    return QuantScheme.create(config.model.dtype, config.model.quantization)


def _rate(per_s: float, unit: str) -> str:
    return f"{per_s / 1e9:.3g} {unit}" if per_s else f"an unknown number of {unit}"
