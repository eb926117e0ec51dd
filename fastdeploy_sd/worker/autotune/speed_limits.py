"""What memory and arithmetic allow a model at most on this machine: a line in the log of a start. Needs no Paddle."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.config import Config
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from fastdeploy_sd.ops.roofs import Roofs, measure_roofs

# Beyond the caches of two threads, written and read within 50 ms where memory reads 30 GB/s.
STREAM_BYTES = 128 << 20
NUM_PASSES = 3


@dataclass(frozen=True, slots=True)
class SpeedLimits:
    """The machine, measured once, and the model's formats."""

    roofs: Roofs
    scheme: QuantScheme

    @classmethod
    def measure(cls, config: Config) -> SpeedLimits:
        """Measure the machine for the formats of a configuration: some 50 ms and `STREAM_BYTES` of memory."""
        scheme = QuantScheme.create(config.model.dtype, config.model.quantization)
        return cls(measure_roofs((scheme.linear,), STREAM_BYTES, NUM_PASSES), scheme)

    def describe(self, checkpoint: Checkpoint) -> str:
        """Return a line: bandwidth, peak, the most steps per second, and the rows up to which memory is the limit.

        Raises:
            CheckpointError: as read_decoder_config.
        """
        parts = [f"memory reads {_rate(self.roofs.read_bytes_per_s, 'GB/s')}"]
        num_bytes = _bytes_per_step(checkpoint, self.scheme)
        if num_bytes is not None and self.roofs.read_bytes_per_s:
            parts[0] += f", at most {self.roofs.steps_per_s(num_bytes):.0f} steps/s if no cache holds the weights"
        parts.append(f"{self.scheme.linear} arithmetic reaches {_rate(self.roofs.peaks[self.scheme.linear], 'GOP/s')}")
        rows = self.roofs.free_rows(self.scheme.linear)
        if rows is not None:
            parts.append(f"memory limits steps of up to {rows} rows, arithmetic larger ones and prompts")
        return "; ".join(parts)


def bytes_per_step(config: Config, checkpoint: Checkpoint) -> int:
    """Return the bytes of weights that a step of one row reads, over all ranks; 0 = not known.

    Raises:
        CheckpointError: as read_decoder_config.
    """
    return _bytes_per_step(checkpoint, QuantScheme.create(config.model.dtype, config.model.quantization)) or 0


def _bytes_per_step(checkpoint: Checkpoint, scheme: QuantScheme) -> int | None:
    return weight_bytes_per_step(read_decoder_config(checkpoint.config, str(checkpoint.config_path)), scheme)


def _rate(per_s: float, unit: str) -> str:
    return f"{per_s / 1e9:.3g} {unit}" if per_s else f"an unknown number of {unit}"
