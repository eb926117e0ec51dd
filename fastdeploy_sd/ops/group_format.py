"""How integers with a scale per group of inputs are held: by files, and by kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fastdeploy_sd.ops.linear_format import LinearFormat

# Inputs of a unit, which has one step.
UNIT = 128


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """fdsd::GroupFormat.

    Attributes:
        bits: of a code.
        group: inputs that share a scale.
        scale, minimum: "half" and "float" are one per group, "steps" a half per 128 inputs times an int8 per group,
            "zeros" the scale times an int8 per group, a zero point. "factors" are wint4's: a float per 128 inputs times
            a number of four bits per group, which has a zero point of four bits as well.
        zero: what is added to a code.
    """

    bits: int
    group: int
    scale: Literal["half", "float", "steps", "factors"]
    minimum: Literal["none", "half", "float", "steps", "zeros"]
    zero: int

    @property
    def unit(self) -> int:
        """Inputs at whose multiples slices may begin: a unit has one step."""
        return UNIT if "steps" in (self.scale, self.minimum) else self.group

    def holds(self, other: GroupFormat) -> bool:
        """Whether this format has all numbers of another."""
        return (
            other.group % self.group == 0
            and self.zero >= other.zero
            and (1 << self.bits) - self.zero >= (1 << other.bits) - other.zero
            and self.scale in (other.scale, "float")
            and (other.minimum == "none" or self.minimum in (other.minimum, "float"))
        )


GROUP_FORMATS: Mapping[LinearFormat, GroupFormat] = {
    "q4_0": GroupFormat(4, 32, "half", "none", 8),
    "q4_1": GroupFormat(4, 32, "half", "half", 0),
    "q5_0": GroupFormat(5, 32, "half", "none", 16),
    "q5_1": GroupFormat(5, 32, "half", "half", 0),
    "q8_0": GroupFormat(8, 32, "half", "none", 128),
    "q2_k": GroupFormat(4, 16, "steps", "steps", 0),
    "q3_k": GroupFormat(4, 16, "steps", "none", 8),
    "q4_k": GroupFormat(4, 32, "steps", "steps", 0),
    "q5_k": GroupFormat(5, 32, "steps", "steps", 0),
    "q6_k": GroupFormat(6, 16, "steps", "none", 32),
    "iq4_xs": GroupFormat(8, 32, "steps", "none", 128),
    "mxfp4": GroupFormat(5, 32, "float", "none", 16),
    "int8_g16": GroupFormat(8, 16, "float", "float", 128),
    "int6_g16": GroupFormat(6, 16, "steps", "steps", 32),
    "int4_g32": GroupFormat(4, 32, "float", "zeros", 8),
    "int4_g64": GroupFormat(4, 64, "float", "zeros", 8),
    "int4_g128": GroupFormat(4, 128, "float", "zeros", 8),
    "int8_g32": GroupFormat(8, 32, "float", "zeros", 128),
    "wint4": GroupFormat(4, 16, "factors", "none", 0),
    "wint8": GroupFormat(8, 128, "float", "none", 128),
}
