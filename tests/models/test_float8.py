"""Checkpoints of e4m3 with scales per block of 128 x 128, as DeepSeek's and Qwen's, per output or tensor."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.device.device import choose
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import Checkpoint
from fastdeploy_sd.models.quant_scheme import QuantScheme
from fastdeploy_sd.models.registry import read_decoder_config
from fastdeploy_sd.models.weight_bytes import weight_bytes_per_step
from fastdeploy_sd.models.weights.decoder_weights import DecoderWeights
from fastdeploy_sd.models.weights.packer import WeightPacker
from fastdeploy_sd.models.weights.storages.float8 import BLOCK, Float8Part
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.weight_matrix import FloatPart, WeightMatrix
from fastdeploy_sd.types.ranges import WHOLE, SliceRule
from tests.engine.gpu import gpu_device
from tests.models import golden, quantized_files, rewrite
from tests.models.harness import SingleSequence
from tests.models.mtp_models import make_model
from tests.models.published_configs import GLM
from tests.ops.cuda_device import EMULATED, emulated
from tests.ops.test_grouped_linear import packed as packed_matrix

pytestmark = pytest.mark.slow

DESCRIPTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAME = "qwen3-tiny"
Array = npt.NDArray[Any]


def coded(rng: np.random.Generator, rows: int, columns: int) -> tuple[Array, Array]:
    """Codes of all numbers but NaN, the greatest in every 128 inputs, and scales."""
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    codes[:, ::16] = 0x7E
    scales = rng.uniform(0.01, 2.0, (-(-rows // BLOCK), -(-columns // BLOCK))).astype(np.float32)
    return codes, scales


def stored(matrix: WeightMatrix, slices: SliceRule = WHOLE) -> Array:
    """The matrix packed with its own codes where that can be: the same bytes in both formats of e4m3."""
    data: Array = packed_matrix(matrix, "fp8", slices).data
    return data


def units(packed: Array, num_panels: int = 1) -> Array:
    """By panel and group: codes, and scales."""
    return packed.reshape(num_panels, -1, 32 * 128 + 32 * 4)


@pytest.mark.parametrize(
    ("shapes", "columns", "slices"),
    [([40], 256, WHOLE), ([130, 70, 3], 300, WHOLE), ([32], 512, SliceRule(4, 128)), ([20], 96, SliceRule(4, 24))],
)
def test_codes_and_scales_are_packed_as_they_are(shapes: list[int], columns: int, slices: SliceRule) -> None:
    """Every group has the greatest number, so that quantising anew would find the same scales and codes."""
    rng = np.random.default_rng(3)
    parts = [coded(rng, rows, columns) for rows in shapes]
    matrix = WeightMatrix(tuple(Float8Part("w", codes, scales) for codes, scales in parts))
    got = stored(matrix, slices)
    want = pack_linear(matrix.numbers(), "fp8", slices).data
    unit = (-1, 32 * 128 + 128)
    np.testing.assert_array_equal(got.reshape(unit)[:, :4096], want.reshape(unit)[:, :4096])
    got_scales, want_scales = (data.reshape(unit)[:, 4096:].copy().view(np.float32) for data in (got, want))
    np.testing.assert_allclose(got_scales, want_scales, rtol=3e-7)  # 448 * scale / 448


def test_ranks_have_the_bytes_of_the_whole() -> None:
    """Also of groups that lie in one block on one rank, where another's reach into two, and beside a NaN."""
    rng, rule = np.random.default_rng(6), SliceRule(2, 448)
    codes, scales = rng.integers(0, 256, (40, 896)).astype(np.uint8), coded(rng, 40, 896)[1]
    codes[codes & 0x7F > 0x70] = 0x15  # no group has the greatest number, so that quantising anew finds other codes
    codes[3, 5] = codes[33, 700] = 0x7F
    whole = WeightMatrix((Float8Part("w", codes, scales),))
    want = units(stored(whole, rule), 2)
    got = [units(stored(whole.columns(part), rule.of_rank(2)), 2) for part in rule.ranges(896)]
    np.testing.assert_array_equal(np.concatenate(got, axis=1), want)
    rows = [units(stored(whole.rows([range(begin, end)]), rule)) for begin, end in ((0, 32), (32, 40))]
    np.testing.assert_array_equal(np.concatenate(rows), want)
    # Of the eight groups those behind the first slice's reach into two blocks; the NaNs are in the first and the sixth.
    anew = units(pack_linear(whole.numbers(), "fp8", rule).data, 2)
    is_anew = (want == anew)[:, :, :4096].reshape(2, 8, 32, 32, 4).all(axis=(2, 4))
    assert [bool(is_anew[1, g, 1]) for g in range(8)] == [False] * 4 + [True] * 3 + [False]
    np.testing.assert_array_equal(np.flatnonzero(is_anew[0, 0]), [3])


def test_parts_of_a_matrix_keep_their_scales() -> None:
    codes, scales = coded(np.random.default_rng(4), 300, 260)
    whole = WeightMatrix((Float8Part("w", codes, scales),))
    part = whole.rows([range(100, 290)]).columns(range(130, 250))
    np.testing.assert_array_equal(part.to_array(), whole.to_array()[100:290, 130:250])


def test_every_code_is_its_number() -> None:
    codes = np.arange(256, dtype=np.uint8)[None]
    values = widen(Float8Part("w", codes, np.array([[2.0, 1.0]], np.float32)).numbers().data)[0]
    assert (values[0x7E], values[0x38], values[1], values[0xFE], values[0x81]) == (896, 2, 2**-8, -448, -(2.0**-9))
    assert np.isnan(values[[0x7F, 0xFF]]).all()


def write(path: pathlib.Path, change: Mapping[str, np.ndarray] | None = None) -> pathlib.Path:
    """A golden model whose matrices are coded, and beside it one of the numbers that these are."""
    rng = np.random.default_rng(5)
    tensors, plain = rewrite.read(NAME), rewrite.read(NAME)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        codes, scales = coded(rng, rows, columns)
        scales *= np.float32(0.0005)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = Float8Part("w", codes, scales).numbers().data
    for folder, values, config in (("coded", tensors, {"quantization_config": DESCRIPTION}), ("plain", plain, {})):
        rewrite.write_folder(path / folder, NAME, config)
        rewrite.write_file(
            path / folder / "model.safetensors",
            values | dict(change if change is not None and folder == "coded" else {}),
        )
    return path


def packed(path: pathlib.Path, fmt: LinearFormat) -> list[np.ndarray]:
    checkpoint = Checkpoint(path)
    weights = DecoderWeights(checkpoint, read_decoder_config(checkpoint.config))
    weights.verify()
    packer = WeightPacker(checkpoint)
    matrices = [weights.qkv(1)[0], weights.gate_up(1)[0], weights.down(1)[0]]
    return [np.asarray(packer.linear(matrix, fmt).data.numpy()) for matrix in matrices]


def numbers(codes: Array) -> Array:
    return Float8Part("w", codes, np.ones((1, 1), np.float32), (), codes.shape).numbers().data


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("tensor", FP8), ("tensor", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        ("tensor", quantized_files.compressed_tensors("float-quantized")), ("channel", {"quant_method": "fbgemm_fp8"}),
        ("channel", quantized_files.compressed_tensors("float-quantized")),
        ("block", quantized_files.compressed_tensors("float-quantized")),
    ],
)  # fmt: skip
def test_scales_of_tensors_outputs_and_blocks(kind: str, description: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Whatever tool wrote them, and some matrices as plain numbers."""
    method = quantized_files.float8(kind, description)
    path, plain = quantized_files.write(tmp_path, NAME, method, others={"k_proj": None})
    tokens = np.arange(3, 20, dtype=np.int32)
    coded = SingleSequence(path, "float32")
    np.testing.assert_array_equal(coded.logits(tokens), SingleSequence(plain, "float32").logits(tokens))


def test_glm_with_a_draft_layer_is_read_as_released_in_float8(tmp_path: pathlib.Path) -> None:
    """Experts, shared experts and the draft layer in codes with a scale per output; its eh_proj and routers plain."""
    model = str(make_model(tmp_path / "m", "glm4_moe-tiny", "numbered").path)
    method = quantized_files.float8("channel", GLM["GLM-4.5-FP8"]["quantization_config"])
    path, plain = quantized_files.write(tmp_path, model, method, others={"eh_proj": None})
    names = Checkpoint(path).names()
    assert "model.layers.3.mlp.experts.0.up_proj.weight_scale" in names
    assert "model.layers.3.eh_proj.weight_scale" not in names
    verify_with_drafts(path, plain)


def test_qwen3_5_is_read_as_released_in_float8(tmp_path: pathlib.Path) -> None:
    """Blocks of 128 x 128: here half of a block's rows are of a head's query, and half of its gate."""
    model = str(make_model(tmp_path / "m", "qwen3_5-tiny", "qwen").path)
    path, plain = quantized_files.write(tmp_path, model, quantized_files.float8("block", DESCRIPTION))
    own, wanted = (
        DecoderWeights(source, read_decoder_config(source.config)) for source in map(Checkpoint, (path, plain))
    )
    gate, wanted_gate = own.output_gate(3), wanted.output_gate(3)
    assert gate is not None
    assert wanted_gate is not None
    for matrix, wanted_matrix in ((own.qkv(3)[0], wanted.qkv(3)[0]), (gate, wanted_gate)):
        assert {type(part) for part in matrix.parts} == {Float8Part}
        np.testing.assert_array_equal(widen(matrix.to_array()), widen(wanted_matrix.to_array()))
    assert [part.place for part in gate.parts] == [f"[{begin}:{begin + 64}]" for begin in range(64, 512, 128)]
    names = Checkpoint(path).names()
    assert "model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv" in names
    assert "model.layers.0.linear_attn.in_proj_a.weight_scale_inv" not in names
    verify_with_drafts(path, plain)


def verify_with_drafts(path: pathlib.Path, plain: pathlib.Path) -> None:
    """The logits of a model are those of its numbers, and its MTP layer changes no token."""
    tokens = np.arange(3, 20, dtype=np.int32)
    coded = SingleSequence(path, "float32")
    np.testing.assert_array_equal(coded.logits(tokens), SingleSequence(plain, "float32").logits(tokens))
    answers = []
    for speculative in ({"method": "mtp", "num_speculative_tokens": 2}, "naive"):
        with LLM(str(path), num_gpu_blocks_override=64, speculative_config=speculative) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=24)
            outputs = llm.generate(prompt_token_ids=[tokens.tolist()] * 2, sampling_params=sampling)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_codes_of_all_kinds_are_packed_as_they_are(kind: str) -> None:
    """Of a part in the middle."""
    blocks = {"tensor": (200, 256), "channel": (1, 256), "block": (128, 128)}[kind]
    tensors, values = quantized_files.float8(kind, {}).store(np.random.default_rng(1), (200, 256))
    scales = tensors["weight_scale"].reshape(-(-200 // blocks[0]), -1)
    part = Float8Part("w", tensors["weight"], scales, (), blocks).rows(100, 200).columns(128, 256)
    found = part.codes("fp8", WHOLE)
    assert found is not None
    assert found.is_exact.all()
    np.testing.assert_array_equal(numbers(found.read(range(100))) * found.scales, values[100:, 128:])


@pytest.mark.parametrize("fmt", ["bfloat16", "wint8"])
def test_a_processor_packs_the_numbers_that_it_holds(tmp_path: pathlib.Path, fmt: LinearFormat) -> None:
    choose(None)
    path = write(tmp_path)
    for got, want in zip(packed(path / "coded", fmt), packed(path / "plain", fmt), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_a_processor_keeps_the_codes(kind: str, tmp_path: pathlib.Path) -> None:
    """With rows of bfloat16, but for slices that no group of 128 inputs ends with. The forecast counts that."""
    choose(None)
    path, plain = quantized_files.write(tmp_path, NAME, quantized_files.float8(kind, {}))
    checkpoint = Checkpoint(path)
    weights = DecoderWeights(checkpoint, read_decoder_config(checkpoint.config))
    packer = WeightPacker(checkpoint, keeps_integers=True)
    matrix = weights.gate_up(1)[0]
    own = packer.linear(matrix, "bfloat16")
    assert own.format == "e4m3"
    np.testing.assert_array_equal(np.asarray(own.data.numpy()), stored(matrix))
    assert packer.linear(matrix, "float32").format == "float32"
    assert packer.linear(weights.down(1)[0], "bfloat16", SliceRule(2, 80)).format == "bfloat16"

    tokens = np.arange(3, 20, dtype=np.int32)
    kept, numbers = SingleSequence(path, "bfloat16", keeps_integers=True), SingleSequence(plain, "bfloat16")
    assert kept.num_packed_bytes < 0.9 * numbers.num_packed_bytes
    scheme = QuantScheme.create("bfloat16", None)
    per_step = weight_bytes_per_step(kept.config, scheme, weights)
    assert per_step is not None
    assert per_step == kept.num_packed_bytes
    got, want = kept.logits(tokens), numbers.logits(tokens)
    assert 0 < np.sqrt(np.mean((got - want) ** 2)) < 0.02 * np.std(want)


def test_a_gpu_gets_the_codes(tmp_path: pathlib.Path) -> None:
    """Of a matrix, and of those experts that have any."""
    path = write(tmp_path)
    coded_one, plain = Checkpoint(path / "coded"), Checkpoint(path / "plain")
    matrices = [
        DecoderWeights(checkpoint, read_decoder_config(checkpoint.config)).gate_up(1)[0]
        for checkpoint in (coded_one, plain)
    ]
    with gpu_device(EMULATED):
        choose(emulated().device)
        read, packer = emulated().device.read, WeightPacker(coded_one)
        np.testing.assert_array_equal(read(packer.linear(matrices[0], "fp8").data), stored(matrices[0]))
        kept = WeightPacker(coded_one, keeps_integers=True)
        own, experts = kept.linear(matrices[0], "bfloat16"), kept.experts([matrices[0]], "bfloat16")
        assert own.format == experts.format == "e4m3"
        for data in (own.data, experts.data):
            np.testing.assert_array_equal(read(data), stored(matrices[0]))
        want = [pack_linear(matrices[1], "fp8").data, stored(matrices[0])]
        np.testing.assert_array_equal(read(packer.experts(matrices[::-1], "fp8").data), np.concatenate(want))


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("_scale_inv", np.ones((1, 2), np.float32), r"expected shape \(3, 1\), got \(1, 2\)"),
        ("_scale_inv", np.full((3, 1), np.inf, np.float32), "expected finite numbers, got others"),
        ("", np.zeros((128, 320), np.uint8), r"expected shape \(320, 128\), got \(128, 320\)"),
    ],
)
def test_what_is_no_such_weight_is_refused(
    tmp_path: pathlib.Path, suffix: str, value: np.ndarray, message: str
) -> None:
    name = f"model.layers.0.mlp.gate_proj.weight{suffix}"
    path = write(tmp_path, {name: value})
    with pytest.raises(CheckpointError, match=message):
        packed(path / "coded", "bfloat16")


def test_scales_that_are_missing_are_named(tmp_path: pathlib.Path) -> None:
    rewrite.write_folder(tmp_path / "x", NAME, {"quantization_config": DESCRIPTION})
    tensors = rewrite.read(NAME)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.zeros(tensors[name].shape, np.uint8)
    rewrite.write_file(tmp_path / "x" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"expected a tensor '{name}_scale_inv'"):
        packed(tmp_path / "x", "bfloat16")


def test_other_tensors_keep_their_types() -> None:
    """A matrix that was not converted is read as ever."""
    checkpoint = Checkpoint(golden.ROOT / NAME)
    weights = DecoderWeights(checkpoint, read_decoder_config(checkpoint.config))
    part = weights.down(0)[0].parts[0]
    assert isinstance(part, FloatPart)
    assert part.numbers() is part
    assert widen(part.data).dtype == np.float32
