"""Op calls that are made in every step: their params point to whole arrays from the start, a run writes only counts."""

from __future__ import annotations

import ctypes
from typing import Any

from fastdeploy_sd.device.library import CParams, function


class BoundCall:
    """One op and its params; what these point to is kept alive. Counts are written to `params` before a run."""

    def __init__(self, op: str, params: CParams, arrays: object = None) -> None:
        self._op, self._function = op, function(op)
        self.params: Any = params
        self._arrays = arrays
        self._reference = ctypes.byref(params)

    def run(self) -> None:
        """Run the op, or start it where the device runs in its own time.

        Raises ValueError: the kernel refused its arguments; the text names op and argument.
        """
        error = self._function(self._reference)
        if error:
            raise ValueError(f"{self._op}: {error.decode()}")
