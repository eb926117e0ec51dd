"""The block types of GGUF files as integers, scales and minima.

Source: llama.cpp's ggml/src/ggml-common.h describes the layouts of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.weight_matrix import Factors, Integers
from fastdeploy_sd.types import F32, U8

I8 = npt.NDArray[np.int8]
Bits = npt.NDArray[np.integer[Any]]  # u8, of which a type checker loses track
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type whose elements are stored in blocks.

    Attributes:
        size: elements of a block, neighbours in a row.
        num_bytes: of a block.
        fmt: the format of groups that holds it.
        unpack: u8[n, num_bytes] -> Integers of n blocks.
    """

    size: int
    num_bytes: int
    fmt: LinearFormat
    unpack: Callable[[U8], Integers]


def _halves(data: U8) -> F32:
    """float16 bytes u8[n, 2 * m] -> f32[n, m]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: U8) -> Bits:
    """u8[n, m] -> u8[n, 2 * m]: the low four bits of all bytes, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _bit_planes(data: U8, shifts: list[int], mask: int) -> Bits:
    """u8[n, m, k] -> u8[n, m, shifts, k]: bits of every byte, shift after shift."""
    return data[:, :, None, :] >> np.array(shifts, np.uint8)[:, None] & mask


def _fifth_bits(data: U8) -> Bits:
    """u8[n, 4] -> u8[n, 32]: 16 where the bit is set."""
    return np.unpackbits(data, axis=1, bitorder="little") << 4


def _signed(codes: Bits, zero: int) -> I8:
    return codes.astype(np.int8) - np.int8(zero)


def _factors(steps: F32, counts: npt.NDArray[np.generic]) -> Factors:
    """f32[n, 1] and i8 or u8 [n, G] -> factors of G groups."""
    return Factors(np.repeat(steps, counts.shape[1], axis=1), np.ascontiguousarray(counts).view(np.int8))


def _six_bits(data: U8) -> tuple[Bits, Bits]:
    """u8[n, 12] -> the scales and minima of eight groups, u8[n, 8] each, from 0 to 63."""
    scales, minima, rest = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([scales & 63, rest & 15 | scales >> 6 << 4], axis=1)
    minima = np.concatenate([minima & 63, rest >> 4 | minima >> 6 << 4], axis=1)
    return scales, minima


def _q4_0(blocks: U8) -> Integers:
    return Integers(_signed(_nibbles(blocks[:, 2:]), 8), Factors(_halves(blocks[:, :2])))


def _q4_1(blocks: U8) -> Integers:
    return Integers(
        _signed(_nibbles(blocks[:, 4:]), 0), Factors(_halves(blocks[:, :2])), Factors(_halves(blocks[:, 2:4]))
    )


def _q5_0(blocks: U8) -> Integers:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Integers(_signed(codes, 16), Factors(_halves(blocks[:, :2])))


def _q5_1(blocks: U8) -> Integers:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Integers(_signed(codes, 0), Factors(_halves(blocks[:, :2])), Factors(_halves(blocks[:, 2:4])))


def _q8_0(blocks: U8) -> Integers:
    return Integers(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), Factors(_halves(blocks[:, :2])))


def _q2_k(blocks: U8) -> Integers:
    scales, steps = blocks[:, :16], _halves(blocks[:, 80:84])
    codes = _bit_planes(blocks[:, 16:80].reshape(-1, 2, 32), [0, 2, 4, 6], 3).reshape(-1, 256)
    return Integers(_signed(codes, 0), _factors(steps[:, :1], scales & 15), _factors(steps[:, 1:], scales >> 4))


def _q3_k(blocks: U8) -> Integers:
    low = _bit_planes(blocks[:, 32:96].reshape(-1, 2, 32), [0, 2, 4, 6], 3).reshape(-1, 256)
    high = _bit_planes(blocks[:, None, :32], list(range(8)), 1).reshape(-1, 256)
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]) | _bit_planes(packed[:, None, 8:], [0, 2, 4, 6], 3).reshape(-1, 16) << 4
    return Integers(_signed(low | high << 2, 4), _factors(_halves(blocks[:, 108:]), _signed(scales, 32)))


def _q4_k(blocks: U8) -> Integers:
    codes = _bit_planes(blocks[:, 16:].reshape(-1, 4, 32), [0, 4], 15).reshape(-1, 256)
    return _with_six_bits(codes, blocks)


def _q5_k(blocks: U8) -> Integers:
    low = _bit_planes(blocks[:, 48:].reshape(-1, 4, 32), [0, 4], 15).reshape(-1, 256)
    high = _bit_planes(blocks[:, None, 16:48], list(range(8)), 1).reshape(-1, 256)
    return _with_six_bits(low | high << 4, blocks)


def _with_six_bits(codes: Bits, blocks: U8) -> Integers:
    steps, (scales, minima) = _halves(blocks[:, :4]), _six_bits(blocks[:, 4:16])
    return Integers(_signed(codes, 0), _factors(steps[:, :1], scales), _factors(steps[:, 1:], minima))


def _q6_k(blocks: U8) -> Integers:
    low = _bit_planes(blocks[:, :128].reshape(-1, 2, 64), [0, 4], 15).reshape(-1, 256)
    high = _bit_planes(blocks[:, 128:192].reshape(-1, 2, 32), [0, 2, 4, 6], 3).reshape(-1, 256)
    return Integers(_signed(low | high << 4, 32), _factors(_halves(blocks[:, 208:]), blocks[:, 192:208]))


def _iq4_nl(blocks: U8) -> Integers:
    return Integers(_IQ4[_nibbles(blocks[:, 2:])], Factors(_halves(blocks[:, :2])))


def _iq4_xs(blocks: U8) -> Integers:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2).astype(np.uint16) & 3
    low = _bit_planes(blocks[:, 4:8, None], [0, 4], 15).reshape(-1, 8)
    scales = _signed(low | high.astype(np.uint8) << 4, 32)
    codes = _IQ4[_bit_planes(blocks[:, 8:].reshape(-1, 8, 16), [0, 4], 15)].reshape(-1, 256)
    return Integers(codes, _factors(_halves(blocks[:, :2]), scales))


def _mxfp4(blocks: U8) -> Integers:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return Integers(_E2M1_DOUBLED[_nibbles(blocks[:, 1:])], Factors(scales))


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, "q4_0", _q4_0),
    "Q4_1": BlockType(32, 20, "q4_1", _q4_1),
    "Q5_0": BlockType(32, 22, "q5_0", _q5_0),
    "Q5_1": BlockType(32, 24, "q5_1", _q5_1),
    "Q8_0": BlockType(32, 34, "q8_0", _q8_0),
    "Q2_K": BlockType(256, 84, "q2_k", _q2_k),
    "Q3_K": BlockType(256, 110, "q3_k", _q3_k),
    "Q4_K": BlockType(256, 144, "q4_k", _q4_k),
    "Q5_K": BlockType(256, 176, "q5_k", _q5_k),
    "Q6_K": BlockType(256, 210, "q6_k", _q6_k),
    "IQ4_NL": BlockType(32, 18, "q8_0", _iq4_nl),
    "IQ4_XS": BlockType(256, 136, "iq4_xs", _iq4_xs),
    "MXFP4": BlockType(32, 17, "mxfp4", _mxfp4),
}
