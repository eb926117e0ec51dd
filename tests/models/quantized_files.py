"""Writes tiny models as AutoAWQ and others store them, with packers written from the descriptions of the layouts."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.bf16 import from_bf16, to_bf16
from fastdeploy_sd.types import F32
from tests.models import rewrite

Array = npt.NDArray[Any]
# What a weight is stored as: tensors by the end of their names, and the numbers f32[N, K] that they stand for.
Stored = tuple[dict[str, Array], F32]


@dataclass(frozen=True)
class Method:
    """How some tool stores weights.

    Attributes:
        description: quantization_config.
        store: (random numbers, shape [N, K]) -> Stored.
    """

    description: Mapping[str, Any]
    store: Callable[[np.random.Generator, tuple[int, int]], Stored]


def random_integers(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int
) -> tuple[Array, Array, Array]:
    """Return integers [N, K], zero points and scales [N, K / group]."""
    groups = shape[0], shape[1] // group
    middle = 1 << (bits - 1)
    zeros = rng.integers(middle - middle // 2, middle + middle // 2 + 1, groups)
    zeros[0, 0], zeros[1, 0] = 0, (1 << bits) - 1
    scales = rng.uniform(0.2, 1.0, groups) * 0.1 / middle
    return rng.integers(0, 1 << bits, shape), zeros, scales


def numbers(integers: Array, zeros: Array, scales: Array) -> F32:
    """(integer - zero point) * scale, group by group."""
    values = np.empty(integers.shape, np.float32)
    group = integers.shape[1] // scales.shape[1]
    for g in range(scales.shape[1]):
        own = slice(g * group, (g + 1) * group)
        values[:, own] = (integers[:, own] - zeros[:, g, None]) * scales[:, g, None].astype(np.float32)
    return values


def words(integers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """Neighbours along an axis in words of 32 bits; `order` says which of them the n-th from the lowest bits on is."""
    per_word = 32 // bits
    moved = np.moveaxis(integers, axis, 0)
    missing = -len(moved) % per_word
    padded = np.concatenate([moved, np.zeros((missing, *moved.shape[1:]), moved.dtype)]).astype(np.uint32)
    packed = np.zeros((len(padded) // per_word, *padded.shape[1:]), np.uint32)
    for n in range(per_word):
        packed |= padded[(n if order is None else order[n]) :: per_word] << np.uint32(n * bits)
    return np.ascontiguousarray(np.moveaxis(packed, 0, axis)).view(np.int32)


def input_order(size: int) -> Array:
    """Of inputs by their importance, which matrices that read the same rows share."""
    return np.random.default_rng(size).permutation(size)


def awq(group: int) -> Method:
    """AutoAWQ's layout gemm: inputs are rows."""

    def store(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
        integers, zeros, scales = random_integers(rng, shape, 4, group)
        scales, order = scales.astype(np.float16), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(integers.T, 4, 1, order),
            "qzeros": words(zeros.T, 4, 1, order),
            "scales": scales.T.copy(),
        }
        return tensors, numbers(integers, zeros, scales)

    return Method({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, store)


def gptq(bits: int, group: int, version: str = "gptq", *, act_order: bool = False, zero: int | None = None) -> Method:
    """AutoGPTQ's form: inputs are rows; of zero points, all `zero` if given, 1 is subtracted unless it is gptq_v2."""

    def store(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
        integers, zeros, scales = random_integers(rng, shape, bits, group)
        if zero is not None:
            zeros[:] = zero
        scales, ones = scales.astype(np.float16), words(np.ones((1, 32 // bits)), bits, 1)[0, 0]
        values, group_of = numbers(integers, zeros, scales), np.arange(shape[1], dtype=np.int32) // group
        if act_order:
            order = input_order(shape[1])
            integers, values, group_of = integers[:, order], np.ascontiguousarray(values[:, order]), group_of[order]
        return {
            "qweight": words(integers.T, bits, 0),
            "qzeros": words(zeros.T, bits, 1) - (np.int32(version == "gptq") * ones),
            "scales": scales.T.copy(),
            "g_idx": group_of,
            "bias": np.zeros(shape[0], np.float16),
        }, values

    description = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    return Method(description | {"checkpoint_format": version}, store)


def pack_quantized(bits: int, group: int, *, has_zeros: bool = False, act_order: bool = False) -> Method:
    """compressed-tensors' integers in words; group 0 = one of a row."""

    def store(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
        integers, zeros, scales = random_integers(rng, shape, bits, group or shape[1])
        if not has_zeros:
            zeros[:] = 1 << (bits - 1)
        scales = from_bf16(to_bf16(scales.astype(np.float32)))
        values, group_of = numbers(integers, zeros, scales), np.arange(shape[1], dtype=np.int32) // (group or shape[1])
        if act_order:
            order = input_order(shape[1])
            integers, values, group_of = integers[:, order], np.ascontiguousarray(values[:, order]), group_of[order]
        tensors = {"weight_packed": words(integers, bits, 1), "weight_scale": to_bf16(scales)}
        tensors |= {"weight_shape": np.array(shape, np.int32)}
        tensors |= {"weight_zero_point": words(zeros, bits, 0)} if has_zeros else {}
        return tensors | ({"weight_g_idx": group_of} if act_order else {}), values

    return Method(compressed_tensors("pack-quantized"), store)


def int_quantized(*, has_zeros: bool = False, is_tensor: bool = False) -> Method:
    """compressed-tensors' int8 with a scale per output, or for all of a tensor."""

    def store(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        zeros = rng.integers(-20, 20, (shape[0], 1)).astype(np.int8) * np.int8(has_zeros)
        scales = rng.uniform(1e-4, 1e-3, (1 if is_tensor else shape[0], 1)).astype(np.float32)
        values = (codes.astype(np.float32) - zeros) * scales
        return {
            "weight": codes,
            "weight_scale": scales[0] if is_tensor else scales,
            "weight_zero_point": zeros[0] * np.int8(0) if is_tensor else zeros,
        }, values.astype(np.float32)

    return Method(compressed_tensors("int-quantized"), store)


def float8(kind: str, description: Mapping[str, Any]) -> Method:
    """e4m3 with a scale per "tensor", "channel" or "block"."""

    def store(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        exponents, fractions = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
        magnitudes = np.where(exponents == 0, np.ldexp(fractions, -9), np.ldexp(fractions + 8, exponents - 10))
        sizes = {"tensor": (1, 1), "channel": (shape[0], 1), "block": (-(-shape[0] // 128), -(-shape[1] // 128))}
        scales = rng.uniform(1e-4, 5e-4, sizes[kind]).astype(np.float32)
        rows, columns = (
            np.arange(n) * m // n if kind != "block" else np.arange(n) // 128
            for n, m in zip(shape, sizes[kind], strict=True)
        )
        values = np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32) * scales[rows[:, None], columns]
        role = "weight_scale_inv" if "weight_block_size" in description else "weight_scale"
        return {"weight": codes, role: scales[0] if kind == "tensor" else scales}, values

    return Method(description, store)


def compressed_tensors(stored: str) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "input_activations": {"dynamic": False}}}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups, "ignore": ["re:.*lm_head"]}


_CODED = "_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight"


def stored_model(
    model: str, method: Method, others: Mapping[str, Method | None] | None = None
) -> tuple[rewrite.Tensors, rewrite.Tensors]:
    """Return the tensors of a golden model with its projections as a method stores them, and as numbers."""
    rng = np.random.default_rng(8)
    coded, plain = rewrite.read(model), rewrite.read(model)
    for name in [name for name in coded if name.endswith(_CODED)]:
        weight = name.removesuffix(".weight")
        own = next((other for word, other in (others or {}).items() if word in name), method)
        if own is None:
            continue
        tensors, values = own.store(rng, coded.pop(name).shape)
        coded |= {f"{weight}.{role}": value for role, value in tensors.items()}
        plain[name] = values
    return coded, plain


def write(
    path: pathlib.Path,
    model: str,
    method: Method,
    change: Mapping[str, Array] | None = None,
    others: Mapping[str, Method | None] | None = None,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write a golden model with its projections as a method stores them, and the same model in numbers.

    Args:
        change: tensors of the first model that differ.
        others: methods of weights with some word in their names; None leaves them as they are.
    """
    coded, plain = stored_model(model, method, others)
    coded |= dict(change or {})
    configs: dict[str, Any] = {"coded": {"quantization_config": method.description}, "plain": {}}
    for folder, tensors in (("coded", coded), ("plain", plain)):
        rewrite.write_folder(path / folder, model, configs[folder])
        rewrite.write_file(path / folder / "model.safetensors", tensors)
    return path / "coded", path / "plain"
