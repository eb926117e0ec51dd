"""Reading checkpoint directories: tensors, config.json, special ids. Executes nothing from them; knows no model."""

from __future__ import annotations

from fastdeploy_sd.models.checkpoint.checkpoint import Checkpoint, read_config
from fastdeploy_sd.models.weights.safetensors import SafetensorsFile
from fastdeploy_sd.models.weights.source import Weights

__all__ = ["Checkpoint", "SafetensorsFile", "Weights", "read_config"]
