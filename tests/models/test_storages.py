"""A storage is one class and one registry entry: a toy one loads like the numbers that it stands for."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.source import WeightSource
from fastdeploy_sd.models.weights.storages import registry
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightPart
from fastdeploy_sd.types import F32
from fastdeploy_sd.types.shard import Shard
from tests.models import rewrite
from tests.models.harness import SingleSequence
from tests.models.test_sharded_loading import Loaded

pytestmark = pytest.mark.slow

NAME = "qwen3_moe-tiny"
DESCRIPTION = {"quant_method": "int8_rows"}


@dataclass(frozen=True, slots=True, eq=False)
class Int8Part(WeightPart):
    """i8[N, K] times f32[N]."""

    scales: F32

    @property
    def tensors(self) -> tuple[str, ...]:
        return f"{self.name}.codes", f"{self.name}.row_scales"

    def numbers(self) -> FloatPart:
        return FloatPart(self.name, self.data.astype(np.float32) * self.scales[:, None], place=self.place)

    def _cut(self, rows: range, columns: range) -> Self:
        data = self.data[rows.start : rows.stop, columns.start : columns.stop]
        return replace(self, data=data, scales=self.scales[rows.start : rows.stop])


class Int8Rows:
    """int8 codes with a scale per row."""

    name = "int8, a scale per row"

    def described(self, where: str, description: Mapping[str, Any]) -> Int8Rows | None:
        return self if description.get("quant_method") == "int8_rows" else None

    def holds(self, source: WeightSource, weight: str) -> bool:
        return f"{weight}.codes" in source

    def read(self, source: WeightSource, weight: str, shape: tuple[int, int]) -> Int8Part:
        codes = source.tensor(f"{weight}.codes", shape, ("I8",))
        scales = source.tensor(f"{weight}.row_scales", shape[:1], ("F32",))
        return Int8Part(weight, codes, scales.astype(np.float32))


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DESCRIBED", (Int8Rows(),))


def write(path: pathlib.Path, leave_out: str = "") -> tuple[pathlib.Path, pathlib.Path]:
    """Write a golden model with its projections in int8, and the same model in numbers."""
    rng = np.random.default_rng(8)
    coded, plain = rewrite.read(NAME), rewrite.read(NAME)
    for name in [name for name in coded if name.endswith("_proj.weight")]:
        weight = name.removesuffix(".weight")
        codes = rng.integers(-127, 128, coded.pop(name).shape).astype(np.int8)
        scales = rng.uniform(1e-4, 1e-3, len(codes)).astype(np.float32)
        coded |= {f"{weight}.codes": codes, f"{weight}.row_scales": scales}
        plain[name] = codes * scales[:, None]
    coded = {name: value for name, value in coded.items() if not leave_out or not name.endswith(leave_out)}
    for folder, tensors, config in (("coded", coded, {"quantization_config": DESCRIPTION}), ("plain", plain, {})):
        rewrite.write_folder(path / folder, NAME, config)
        rewrite.write_file(path / folder / "model.safetensors", tensors)
    return path / "coded", path / "plain"


@pytest.mark.usefixtures("_registered")
def test_a_model_in_a_new_storage_computes_what_its_numbers_compute(tmp_path: pathlib.Path) -> None:
    coded, plain = (SingleSequence(path, "float32") for path in write(tmp_path))
    tokens = np.arange(3, 20, dtype=np.int32)
    np.testing.assert_array_equal(coded.logits(tokens), plain.logits(tokens))


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("quantization", [None, "wint4"])
def test_every_rank_packs_the_part_that_it_has(tmp_path: pathlib.Path, quantization: str | None) -> None:
    scheme = QuantScheme.create("bfloat16", quantization)  # type: ignore[arg-type]
    coded, plain = write(tmp_path)
    for rank in range(2):
        assert Loaded(coded, Shard(rank, 2), scheme).packed() == Loaded(plain, Shard(rank, 2), scheme).packed()


@pytest.mark.usefixtures("_registered")
def test_a_tensor_of_a_weight_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, leave_out="0.self_attn.q_proj.row_scales")[0])
    with pytest.raises(CheckpointError, match=r"expected a tensor 'model\.layers\.0\.self_attn\.q_proj\.row_scales'"):
        DecoderWeights(checkpoint, read_decoder_config(checkpoint.config)).verify()


def test_a_storage_that_is_not_registered_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="this checkpoint is int8_rows: expected unquantised weights"):
        Checkpoint(write(tmp_path)[0])
