"""Makes the folder of a checkpoint whose weights are quantised already, but for the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tqdm import tqdm

from fastdeploy_sd.config import Quantization
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.quantized_copy import QuantizedCopy
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.process.safetensors_writer import write_safetensors


def write_quantized(model: Path, target: Path, quantization: Quantization) -> int:
    """Write config.json and the weights of a checkpoint into a new folder, and return the bytes of the tensors.

    Raises:
        ConfigError: the folder exists, cannot be made, or has too little room.
        CheckpointError: the model cannot be read.
        OSError: a file cannot be written; the folder then stays, not whole.
    """
    source = Checkpoint(model)
    config = read_decoder_config(source.config, str(source.config_path))
    copy = QuantizedCopy(source, config, QuantScheme.create("bfloat16", quantization))
    num_bytes = copy.num_bytes
    try:
        free = shutil.disk_usage(target.absolute().parent).free
        if free < num_bytes:
            raise ConfigError(f"target: expected room for {num_bytes} bytes, got {free} in {target.absolute().parent}")
        target.mkdir()
    except OSError as error:
        raise ConfigError(f"target: expected a place for a new folder: {error}") from error
    weights = target / "model.safetensors"
    with tqdm(total=num_bytes, desc="quantising weights", unit="B", unit_scale=True, disable=None) as bar:
        write_safetensors(weights, copy.entries(), copy.tensors(), bar.update)
    weights.chmod(source.mode())
    (target / "config.json").write_text(json.dumps(copy.config(), indent=2) + "\n", encoding="utf-8")
    return num_bytes
