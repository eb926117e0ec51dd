"""The ranks that a pass runs on together, as layers see them."""

from __future__ import annotations

from fastdeploy_sd.ops.collective import AnyCommunicator
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard


class TpGroup:
    """One rank's view of its group. A rank that is alone has no communicator."""

    def __init__(self, communicator: AnyCommunicator | None = None) -> None:
        self.shard = WHOLE_MODEL if communicator is None else Shard(communicator.rank, communicator.size)
        self.communicator = communicator

    @property
    def is_alone(self) -> bool:
        return self.shard.size == 1


ALONE = TpGroup()
