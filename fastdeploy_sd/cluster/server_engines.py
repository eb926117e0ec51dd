"""ServerEngines: all engines of a server, which are the groups of its models, numbered through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain

from fastdeploy_sd.cluster.engine_group import EngineGroup
from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.types import ModelInfo

# Engines that run are there much sooner.
_OTHERS_S = 2.0


class ServerEngines:
    """What concerns all engines of a server; a request is its model's group's.

    Attributes:
        groups: one per model.
    """

    def __init__(self, groups: Sequence[EngineGroup]) -> None:
        self.groups = tuple(groups)

    async def connect(self, *, to_all: bool = False) -> None:
        """Wait until an engine of each model, or all of them, has loaded it; Unavailable: none will, or one will not.

        Without `to_all` a model whose engine is down is not waited for as soon as another one is there.
        """
        connecting = [asyncio.create_task(group.connect(to_all=to_all)) for group in self.groups]
        when = asyncio.FIRST_EXCEPTION if to_all else asyncio.FIRST_COMPLETED
        try:
            done, others = await asyncio.wait(connecting, return_when=when)
            if others and not to_all:
                done |= (await asyncio.wait(others, timeout=_OTHERS_S))[0]
        finally:
            for task in connecting:
                task.cancel()
        for task in done:
            await task

    async def close(self) -> None:
        """As EngineGroup; may be called twice."""
        for group in self.groups:
            await group.close()

    async def wait_ended(self) -> None:
        """Wait until no engine is left, and none will be started again."""
        await asyncio.gather(*(group.wait_ended() for group in self.groups))

    async def wait_answered(self) -> None:
        """Wait until no request is left that can be answered after the engines' end."""
        await asyncio.gather(*(group.wait_answered() for group in self.groups))

    def begin_drain(self) -> None:
        """Take no new requests from now on."""
        for group in self.groups:
            group.begin_drain()

    def on_silence(self, call: Callable[[int], None]) -> None:
        """Have the process id of an engine that hangs given to `call`; before `connect`."""
        for group in self.groups:
            group.on_silence = call

    def restore_pauses(self) -> None:
        """Have an engine that is started again be paused if it was; one of a server's processes does."""
        for group in self.groups:
            group.restores_pauses = True

    @property
    def model_infos(self) -> tuple[ModelInfo, ...]:
        """What each engine has loaded; of one that has not yet, what the others of its model have."""
        return tuple(chain.from_iterable(_known_infos(group) for group in self.groups))

    @property
    def loads(self) -> tuple[InstanceLoad, ...]:
        """What each engine has to do, as it said last."""
        return tuple(chain.from_iterable(group.loads for group in self.groups))


def _known_infos(group: EngineGroup) -> list[ModelInfo]:
    return [info or group.model_info for info in group.model_infos]
