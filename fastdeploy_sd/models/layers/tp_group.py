"""The ranks that a pass runs on together, as layers see them."""

from __future__ import annotations

import paddle
from paddle import Tensor

from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.ops.collective import all_gather, all_reduce
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard


class TpGroup:
    """One rank's view of its group. A rank that is alone has no communicator, and no layer calls it.

    Attributes:
        shard: which rank it is, and of how many.
    """

    def __init__(self, communicator: Communicator | GpuCommunicator | None = None) -> None:
        self.shard = WHOLE_MODEL if communicator is None else Shard(communicator.rank, communicator.size)
        self._communicator = communicator

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.shard.size == 1

    def all_reduce(
        self, x: Tensor, dtype: paddle.dtype, bias: Tensor | None = None, shared: Tensor | None = None
    ) -> Tensor:
        """Add the ranks' float32 sums in the fixed tree, then bias f32[N] and `shared` [T, N], rounded to dtype.

        Args:
            x: f32[T, N].

        Returns:
            [T, N] in dtype, the same on every rank.
        """
        assert self._communicator is not None, "a rank that is alone adds nothing"
        return all_reduce(x, self._communicator, dtype, bias, shared)

    def all_gather(self, x: Tensor, num_columns: int, unit: int) -> Tensor:
        """Put the ranks' columns side by side.

        Args:
            x: [T, n]: this rank's range of 0..num_columns, halved at multiples of `unit`.

        Returns:
            [T, num_columns], the same on every rank.
        """
        assert self._communicator is not None, "a rank that is alone has all columns"
        return all_gather(x, self._communicator, num_columns, unit)


ALONE = TpGroup()
