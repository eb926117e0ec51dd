"""Packs weights that a checkpoint stores as the codes that a kernel multiplies, without quantising them again."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import pack_linear
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import U8
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

# Formats whose codes are packed as custom_ops/cpu/kernels/linear_layout.h packs fp8: panels of 32 outputs, in each
# groups of at most 128 inputs, and their scales.
_FORMATS: tuple[LinearFormat, ...] = ("fp8",)
_GROUP, _PANEL, _WORD = 128, 32, 4


def pack_codes(matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE) -> U8 | None:
    """Return a matrix packed for `linear` with the codes and scales that it is stored with.

    A group that codes do not hold exactly is quantised from its numbers. Each group is packed by itself, so ranks that
    have parts of a matrix have the bytes of the whole.

    Returns:
        None where a part has no codes of the format.
    """
    if fmt not in _FORMATS:
        return None
    num_rows, num_columns = matrix.shape
    groups = [
        range(begin, min(begin + _GROUP, piece.stop))
        for piece in slices.ranges(num_columns)
        for begin in range(piece.start, piece.stop, _GROUP)
    ]
    parts = [found for part in matrix.parts if (found := part.codes(fmt, groups)) is not None]
    if len(parts) < len(matrix.parts):
        return None
    num_panels = -(-num_rows // _PANEL)
    codes = np.zeros((num_panels * _PANEL, len(groups), _GROUP), np.uint8)
    scales = np.zeros((num_panels * _PANEL, len(groups)), np.float32)
    is_exact = np.ones(scales.shape, np.bool_)
    scales[:num_rows] = np.concatenate([part.scales for part in parts])
    is_exact[:num_rows] = np.concatenate([part.is_exact for part in parts])
    for g, group in enumerate(groups):
        own = slice(group.start, group.stop)
        np.concatenate([part.codes[:, own] for part in parts], out=codes[:num_rows, g, : len(group)])
    places = num_panels, _PANEL, len(groups)
    words = codes.reshape(*places, _GROUP // _WORD, _WORD).transpose(0, 2, 3, 1, 4)
    scale_words = scales.reshape(places).transpose(0, 2, 1)
    if not is_exact.all():
        mask = is_exact.reshape(places).transpose(0, 2, 1)
        quantised = pack_linear(matrix, fmt, slices).data.reshape(num_panels, len(groups), -1)
        own_words, own_scales = np.split(quantised, [_PANEL * _GROUP], axis=2)
        words = np.where(mask[:, :, None, :, None], words, own_words.reshape(words.shape))
        scale_words = np.where(mask, scale_words, np.ascontiguousarray(own_scales).view(np.float32))
    shape = num_panels, len(groups), -1
    scale_bytes = np.ascontiguousarray(scale_words).view(np.uint8)
    return np.concatenate([words.reshape(shape), scale_bytes.reshape(shape)], axis=2).reshape(-1)
