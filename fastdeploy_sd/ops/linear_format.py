"""The formats that kernels multiply weights in, by name."""

from __future__ import annotations

from typing import Literal, get_args

LinearFormat = Literal[
    "float32", "bfloat16", "wint8", "wint4", "fp8", "float16", "e4m3",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "mxfp4", "int8_g16",
    "int6_g16", "int4_g32", "int4_g64", "int4_g128", "int8_g32",
]  # fmt: skip
_CODES: tuple[LinearFormat, ...] = get_args(LinearFormat)
# Formats of every device, and those of GPUs only.
LINEAR_FORMATS: tuple[LinearFormat, ...] = ("float32", "bfloat16", "wint8", "wint4", "e4m3")
GPU_FORMATS: tuple[LinearFormat, ...] = ("fp8", "float16")


def format_code(fmt: str) -> int:
    """Return the code of fdsd::LinearFormat. Raises ValueError: unknown name."""
    if fmt not in _CODES:
        raise ValueError(f"format: expected one of {', '.join(_CODES)}, got {fmt!r}")
    return _CODES.index(fmt)
