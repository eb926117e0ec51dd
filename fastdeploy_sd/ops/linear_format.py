"""The forms in which weight matrices are stored and multiplied, by name."""

from __future__ import annotations

from typing import Literal, get_args

LinearFormat = Literal["float32", "bfloat16", "wint8", "wint4"]
LINEAR_FORMATS: tuple[LinearFormat, ...] = get_args(LinearFormat)


def format_code(fmt: str) -> int:
    """Return the code of fdsd::LinearFormat.

    Raises:
        ValueError: unknown name.
    """
    if fmt not in LINEAR_FORMATS:
        raise ValueError(f"format: expected one of {', '.join(LINEAR_FORMATS)}, got {fmt!r}")
    return LINEAR_FORMATS.index(fmt)
