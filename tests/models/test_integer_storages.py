"""Checkpoints of integers with a scale and a zero point per group: AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.device.device import choose
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.sharding import DecoderShard
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.models.weights.storages.integers import IntegerPart
from fastdeploy_sd.models.weights.storages.registry import read_weight
from fastdeploy_sd.ops.group_packing import group_format, in_group_order
from fastdeploy_sd.ops.linear import gather_columns, linear
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.reference.linear import read_input
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import F32
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from fastdeploy_sd.types.shard import Shard
from tests.engine.gpu import gpu_device
from tests.models import quantized_files as files
from tests.models import rewrite
from tests.models.harness import SingleSequence
from tests.ops.backends import LEVELS, isa
from tests.ops.cuda_device import EMULATED, emulated
from tests.ops.test_grouped_linear import check, packed

pytestmark = pytest.mark.slow

# How a weight is stored, and the narrowest kernel that holds it exactly.
METHODS: dict[str, tuple[files.Method, LinearFormat]] = {
    "awq, groups of 32": (files.awq(32), "int4_g32"),
    "awq, groups of 128": (files.awq(128), "wint4"),
    "gptq, symmetric": (files.gptq(4, 128, zero=8), "wint4"),
    "gptq, one group": (files.gptq(4, 768), "wint4"),
    "gptq, groups of 64": (files.gptq(4, 64), "int4_g64"),
    "gptq_v2": (files.gptq(4, 32, "gptq_v2", zero=8), "q4_0"),
    "gptq, 2 bits": (files.gptq(2, 64), "int4_g64"),
    "gptq, 8 bits": (files.gptq(8, 128), "int8_g32"),
    "gptq, 8 bits, symmetric": (files.gptq(8, 128, zero=128), "wint8"),
    "compressed-tensors, W4A16": (files.pack_quantized(4, 128), "wint4"),
    "compressed-tensors, W4A16_ASYM": (files.pack_quantized(4, 128, has_zeros=True), "wint4"),
    "compressed-tensors, rows of 4 bits": (files.pack_quantized(4, 0, has_zeros=True), "wint4"),
    "compressed-tensors, rows of 8 bits": (files.pack_quantized(8, 0), "wint8"),
    "compressed-tensors, 8 bits": (files.pack_quantized(8, 32, has_zeros=True), "int8_g32"),
    "compressed-tensors, W8A8": (files.int_quantized(), "wint8"),
    "compressed-tensors, W8A8 with zero points": (files.int_quantized(has_zeros=True), "int8_g32"),
    "compressed-tensors, W8A8 of tensors": (files.int_quantized(is_tensor=True), "wint8"),
}
# The same of groups whose inputs are no neighbours; and in a sum of four slices, whose groups end anywhere.
ACT_ORDER: dict[str, tuple[files.Method, LinearFormat, LinearFormat]] = {
    "gptq": (files.gptq(4, 128, act_order=True), "wint4", "int4_g32"),
    "gptq, symmetric": (files.gptq(4, 64, "gptq_v2", zero=8, act_order=True), "q4_0", "q4_0"),
    "gptq, 8 bits": (files.gptq(8, 128, act_order=True), "int8_g32", "int8_g32"),
    "compressed-tensors": (files.pack_quantized(4, 32, has_zeros=True, act_order=True), "int4_g32", "int4_g32"),
    "compressed-tensors, groups of 16": (files.pack_quantized(8, 16, act_order=True), "int8_g16", "int8_g16"),
}


def stored(path: pathlib.Path, method: files.Method, shape: tuple[int, int]) -> tuple[WeightMatrix, np.ndarray]:
    """A weight in a file, and the numbers that it stands for."""
    rewrite.write_folder(path / "m", "qwen3-tiny", {"quantization_config": method.description})
    tensors, values = method.store(np.random.default_rng(2), shape)
    rewrite.write_file(path / "m" / "model.safetensors", {f"w.{role}": value for role, value in tensors.items()})
    return WeightMatrix((read_weight(Checkpoint(path / "m"), "w", shape),)), values


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_the_numbers_of_their_description(name: str, tmp_path: pathlib.Path) -> None:
    """Of the whole and of parts that begin within a word and within a group."""
    matrix, values = stored(tmp_path, METHODS[name][0], (72, 768))
    np.testing.assert_array_equal(matrix.to_array(), values)
    part = matrix.rows([range(3, 9), range(21, 70)]).columns(range(48, 720)).columns(range(16, 100))
    np.testing.assert_array_equal(part.to_array(), np.concatenate([values[3:9], values[21:70]])[:, 64:148])


@pytest.mark.parametrize("name", METHODS)
def test_kernels_multiply_these_numbers(name: str, tmp_path: pathlib.Path) -> None:
    method, fmt = METHODS[name]
    matrix, _ = stored(tmp_path, method, (72, 768))
    # From the middle of a group on.
    part = matrix.columns(range(48, 768)).rows([range(5, 70)])
    assert group_format([matrix], WHOLE) == fmt
    check(matrix, fmt)
    check(part, group_format([part], WHOLE) or "float32")


@pytest.mark.parametrize("name", ACT_ORDER)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_groups_that_are_no_neighbours_stay_integers(level: str, count: int, name: str, tmp_path: pathlib.Path) -> None:
    with isa(level):
        check_in_order(*ACT_ORDER[name], count, tmp_path)


def check_in_order(
    method: files.Method, of_whole: LinearFormat, of_slices: LinearFormat, count: int, path: pathlib.Path
) -> None:
    """Ranks, which have a half of the sum each, add up what one has; a row's sum is its own."""
    matrix, values = stored(path, method, (72, 768))
    np.testing.assert_array_equal(matrix.to_array(), values)
    slices = WHOLE if count == 1 else SliceRule(count, 128)
    ordered, own_slices, inputs = in_group_order(matrix, slices)
    assert inputs is not None
    assert sorted(inputs[inputs >= 0]) == list(range(768))
    assert group_format([ordered], own_slices) == (of_whole if count == 1 else of_slices)
    np.testing.assert_array_equal(ordered.to_array()[:, inputs >= 0], values[:, inputs[inputs >= 0]])
    x = np.random.default_rng(6).standard_normal((13, 768)).astype(np.float32)
    y = multiplied(matrix, x, slices)
    rounded = read_input(gather_columns(x, inputs), "wint8", own_slices).astype(np.float64)
    want = rounded @ ordered.to_array().astype(np.float64).T
    np.testing.assert_allclose(y, want, atol=3e-6 * np.abs(want).max())
    np.testing.assert_array_equal(multiplied(matrix, x[3:8].copy(), slices), y[3:8])
    rows = range(8, 40)
    np.testing.assert_array_equal(multiplied(matrix.rows([rows]), x, slices), y[:, rows.start : rows.stop])
    if count > 1:
        halves = [
            multiplied(matrix.columns(half), x[:, half.start : half.stop].copy(), slices.of_rank(2))
            for half in SliceRule(2, 128).ranges(768)
        ]
        np.testing.assert_array_equal(halves[0] + halves[1], y)


def multiplied(matrix: WeightMatrix, x: F32, slices: SliceRule) -> F32:
    """The product as a rank computes it."""
    weight, own_slices, inputs = in_group_order(matrix, slices)
    fmt = group_format([weight], own_slices)
    assert fmt is not None
    y: F32 = linear(x, replace(packed(weight, fmt, own_slices), order=inputs))
    return y


def test_matrices_of_several_orders_are_not_rounded(tmp_path: pathlib.Path) -> None:
    first, _ = stored(tmp_path, files.gptq(4, 128, act_order=True), (72, 768))
    [part] = first.parts
    assert isinstance(part, IntegerPart)
    assert part.group_of is not None
    both = WeightMatrix((part, replace(part, group_of=part.group_of[::-1].copy())))
    assert in_group_order(both, WHOLE).inputs is None
    assert group_format([both], WHOLE) == "float32"
    assert in_group_order(WeightMatrix((part, part)), WHOLE).inputs is not None


def test_a_model_computes_what_its_numbers_compute(tmp_path: pathlib.Path) -> None:
    """Its query projections are plain numbers; biases of zeros, which config.json does not mention, are ignored."""
    coded, plain = (
        SingleSequence(path, "float32")
        for path in files.write(tmp_path, "qwen3_moe-tiny", files.gptq(4, 32), others={"q_proj": None})
    )
    tokens = np.arange(3, 20, dtype=np.int32)
    np.testing.assert_array_equal(coded.logits(tokens), plain.logits(tokens))


def test_kernels_of_integers_compute_what_the_numbers_compute(tmp_path: pathlib.Path) -> None:
    """But for the rounding of activations to eight bits."""
    path, plain = files.write(tmp_path, "qwen3-tiny", files.awq(32))
    kept, checkpoint = SingleSequence(path, "float32"), Checkpoint(path)
    packer = WeightPacker(checkpoint, keeps_integers=True)
    kept.decoder = Decoder(checkpoint, kept.config, QuantScheme.create("float32", None), packer)
    tokens = np.arange(3, 40, dtype=np.int32)
    got, want = kept.logits(tokens), SingleSequence(plain, "float32").logits(tokens)
    assert 0 < np.sqrt(np.mean((got - want) ** 2)) < 0.02 * np.std(want)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_packs_its_part_without_rounding(num_ranks: int, tmp_path: pathlib.Path) -> None:
    coded, _ = files.write(tmp_path, "qwen3-tiny", files.awq(32))
    checkpoint = Checkpoint(coded)
    config = read_decoder_config(checkpoint.config)
    weights, packer = DecoderWeights(checkpoint, config), WeightPacker(checkpoint, keeps_integers=True)
    formats = set()
    for rank in range(num_ranks):
        own = DecoderShard(config, Shard(rank, num_ranks)).feed_forward(320)
        formats.add(packer.linear(weights.down(0)[0].columns(own.inputs), "bfloat16", own.slices).format)
    assert formats == {"int8_g16"}  # slices of 80 inputs cut groups of 32
    assert packer.linear(weights.qkv(0)[0], "bfloat16").format == "int4_g32"


@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_agree_on_a_format_though_another_one_holds_the_part_of_one(axis: int, tmp_path: pathlib.Path) -> None:
    """Half of the groups of 64 inputs, or of the outputs, have a scale that wint4's groups of 128 hold."""
    method = files.gptq(4, 64, zero=8)
    tensors, _ = method.store(np.random.default_rng(2), (64, 1024))
    scales = tensors["scales"].copy()  # [groups, outputs]
    np.moveaxis(scales, axis, 0)[: scales.shape[axis] // 2] = 0.5
    rewrite.write_folder(tmp_path / "m", "qwen3-tiny", {"quantization_config": method.description})
    stored = {f"w.{role}": value for role, value in (tensors | {"scales": scales}).items()}
    rewrite.write_file(tmp_path / "m" / "model.safetensors", stored)
    matrix, rule = WeightMatrix((read_weight(Checkpoint(tmp_path / "m"), "w", (64, 1024)),)), SliceRule(4, 128)
    of_outputs = [matrix.rows([rows]) for rows in (range(64), range(32), range(32, 64))]
    assert {group_format([part], rule) for part in of_outputs} == {"q4_0"}
    of_inputs = [matrix.columns(columns) for columns in (range(512), range(512, 1024))]
    assert {group_format([part], rule.of_rank(2)) for part in of_inputs} == {"q4_0"}


def test_ranks_agree_on_a_format_of_inputs_in_the_order_of_groups(tmp_path: pathlib.Path) -> None:
    """All groups have one scale: wint4 would hold the whole, and a rank's part."""
    method = files.gptq(4, 64, zero=8)
    tensors, _ = method.store(np.random.default_rng(2), (64, 1024))
    scales, group_of = tensors["scales"].copy(), np.arange(1024, dtype=np.int32) // 64
    scales[:], group_of = 0.5, np.random.default_rng(3).permutation(group_of)
    rewrite.write_folder(tmp_path / "m", "qwen3-tiny", {"quantization_config": method.description})
    changed = tensors | {"scales": scales, "g_idx": group_of}
    rewrite.write_file(tmp_path / "m" / "model.safetensors", {f"w.{role}": value for role, value in changed.items()})
    matrix = WeightMatrix((read_weight(Checkpoint(tmp_path / "m"), "w", (64, 1024)),))
    rule = SliceRule(4, 128)
    parts = [in_group_order(matrix.columns(half), rule.of_rank(2)) for half in (range(512), range(512, 1024))]
    parts.append(in_group_order(matrix, rule))
    assert {group_format([part.matrix], part.slices) for part in parts} == {"q4_0"}
    assert all(part.inputs is not None for part in parts)


def test_a_gpu_gets_the_integers_that_its_formats_hold(tmp_path: pathlib.Path) -> None:
    matrix, _ = stored(tmp_path, files.pack_quantized(4, 128), (72, 768))
    want = packed(matrix, "wint4").data
    with gpu_device(EMULATED):
        choose(emulated().device)
        got = WeightPacker(Checkpoint(tmp_path / "m"), keeps_integers=True).linear(matrix, "bfloat16")
        assert got.format == "wint4"
        np.testing.assert_array_equal(emulated().device.read(got.data), want)


def test_integers_beside_numbers_are_not_rounded(tmp_path: pathlib.Path) -> None:
    coded, _ = files.write(tmp_path, "qwen3-tiny", files.awq(32), others={"k_proj": None})
    checkpoint = Checkpoint(coded)
    weights = DecoderWeights(checkpoint, read_decoder_config(checkpoint.config))
    assert group_format([weights.qkv(0)[0]], WHOLE) == "float32"
    assert group_format([WeightMatrix(weights.qkv(0)[0].parts[1:2])], WHOLE) is None


WEIGHT = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize(
    ("method", "role", "value", "message"),
    [
        ("awq", "qweight", np.zeros((320, 128), np.int32), r"expected shape \(128, 40\), got \(320, 128\)"),
        ("awq", "qweight", np.zeros((128, 40), np.float32), "expected dtype I32, got F32"),
        ("awq", "qzeros", np.zeros((1, 40), np.int32), r"expected shape \(4, 40\), got \(1, 40\)"),
        ("awq", "scales", np.ones(4, np.float16), "expected a scale per output and group, got shape"),
        ("awq", "scales", np.full((4, 320), np.nan, np.float16), "expected finite scales, got others"),
        ("gptq", "qweight", np.zeros((15, 320), np.int32), "expected words of 128 integers of 2, 4, 8 bits, got shape"),
        ("gptq", "scales", np.zeros((3, 320), np.float16), r"expected shape \(3, 40\), got \(4, 40\)"),
        ("gptq", "g_idx", np.full(128, 4, np.int32), "expected groups from 0 to 3, got 4"),
        ("gptq", "g_idx", np.full(128, -1, np.int32), "expected groups from 0 to 3, got -1"),
        ("even", "weight_scale", np.ones((320, 3), np.float32), "expected groups of a power of two of inputs, got 3"),
        ("packed", "weight_scale", np.ones((4, 320), np.float32), r"expected shape \(320, 320\), got \(4, 320\)"),
        ("packed", "weight_packed", np.zeros((320, 12), np.int32), "expected words of 128 integers of 2, 4, 8 bits"),
        ("packed", "weight_packed", np.zeros((320, 64), np.int8), "expected words of 128 integers of 2, 4, 8 bits"),
        ("packed", "weight_zero_point", np.zeros((320, 4), np.int32), r"expected shape \(40, 4\), got \(320, 4\)"),
        ("packed", "weight_g_idx", np.full(128, 4, np.int32), "expected groups from 0 to 3, got 4"),
        ("gptq", "bias", np.ones(320, np.float16), "expected no tensor beyond those that config.json tells of"),
    ],
)
def test_what_is_no_such_weight_is_refused(
    tmp_path: pathlib.Path, method: str, role: str, value: np.ndarray, message: str
) -> None:
    methods = {"awq": files.awq(32), "gptq": files.gptq(4, 32), "packed": files.pack_quantized(4, 32, has_zeros=True)}
    methods["even"] = files.pack_quantized(4, 32)
    stored = methods[method]
    coded, _ = files.write(tmp_path, "qwen3-tiny", stored, {f"{WEIGHT}.{role}": value})
    checkpoint = Checkpoint(coded)
    with pytest.raises(CheckpointError, match=message) as error:
        DecoderWeights(checkpoint, read_decoder_config(checkpoint.config)).verify()
    assert WEIGHT in str(error.value)
