"""Loads with packed weights that are kept in a file, and what they leave there and say."""

from __future__ import annotations

import logging
import pathlib

import pytest

from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packed_cache import PackedMatrices, packed_matrices
from fastdeploy_sd.models.weights.packer import WeightPacker

SCHEME = QuantScheme.create("bfloat16", "wint4")
Loaded = tuple[dict[str, bytes], bool]


def load(folder: pathlib.Path | None, model: pathlib.Path, scheme: QuantScheme = SCHEME) -> Loaded:
    """Pack, or read, two matrices and one layer's experts; return the bytes, and whether anything was packed."""
    checkpoint = Checkpoint(model)
    with packed_matrices(folder, checkpoint, scheme, "target") as store:
        return packed_parts(checkpoint, scheme, store), store is None or store.has_new


def packed_parts(checkpoint: Checkpoint, scheme: QuantScheme, store: PackedMatrices | None) -> dict[str, bytes]:
    """Pack, or take from the store, two matrices and one layer's experts."""
    config = read_decoder_config(checkpoint.config)
    weights = DecoderWeights(checkpoint, config)
    assert config.moe is not None
    size, names = config.moe.intermediate_size, [f"mlp.experts.{e}" for e in range(config.moe.num_experts)]
    experts = [weights.down(1, name, size)[0] for name in names]
    packer = WeightPacker(checkpoint, store)
    packed = {
        "qkv": packer.linear(weights.qkv(0)[0], scheme.linear).data,
        "head": packer.linear(weights.lm_head(), scheme.lm_head).data,
        "experts": packer.experts(experts, scheme.linear).data,
    }
    return {name: data.numpy().tobytes() for name, data in packed.items()}


def only_file(folder: pathlib.Path) -> pathlib.Path:
    """The one file of packed weights in a folder."""
    (path,) = folder.glob("*.packed")
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The texts of the warnings that were logged."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def damage_byte(path: pathlib.Path, position: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
