"""Makes the folder of a checkpoint whose weights are quantised already, but for the tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path

from tqdm import tqdm

from fastdeploy_sd.config import Quantization
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.quantized_copy import QuantizedCopy
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.process.safetensors_writer import write_safetensors


class QuantizedFolder:
    """config.json and weights of a checkpoint, `num_bytes` of them. Raises CheckpointError: it cannot be read."""

    def __init__(self, model: Path, quantization: Quantization) -> None:
        self._source = Checkpoint(model)
        config = read_decoder_config(self._source.config, str(self._source.config_path))
        self._copy = QuantizedCopy(self._source, config, QuantScheme.create("bfloat16", quantization))
        self.num_bytes = self._copy.num_bytes

    def write(self, target: Path) -> None:
        """Write both into a folder; raises OSError, and CheckpointError: weights are not finite."""
        weights, copy = target / "model.safetensors", self._copy
        with tqdm(total=self.num_bytes, desc="quantising weights", unit="B", unit_scale=True, disable=None) as bar:
            write_safetensors(weights, copy.entries(), copy.tensors(), bar.update)
        weights.chmod(self._source.mode())
        (target / "config.json").write_text(json.dumps(copy.config(), indent=2) + "\n", encoding="utf-8")
