"""A router, or instances of it, that get no new requests while an operator wants that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastdeploy_sd.cluster.router.instance import Instance
from fastdeploy_sd.errors import NotFound, shown

_INSTANCE = "instance"


class PausedInstances:
    """See `Pausable`; a part is an instance by its id, those at an address, or the router itself.

    Args:
        instances: all that are registered.
        num_open: how many requests the router relays.
    """

    selectors: tuple[str, ...] = (_INSTANCE,)

    def __init__(self, instances: Callable[[], list[Instance]], num_open: Callable[[], int]) -> None:
        self._instances, self._num_open = instances, num_open
        self.is_router_paused = False

    async def set_paused(self, part: Mapping[str, str], *, is_paused: bool) -> None:
        if _INSTANCE not in part:
            self.is_router_paused = is_paused
            return
        for instance in self._chosen(part):
            instance.is_paused = is_paused

    async def num_requests(self, part: Mapping[str, str]) -> int:
        if _INSTANCE not in part:
            return self._num_open()
        return sum(instance.num_given for instance in self._chosen(part))

    def is_paused(self, part: Mapping[str, str]) -> bool:
        if _INSTANCE not in part:
            return self.is_router_paused
        return all(instance.is_paused for instance in self._chosen(part))

    def _chosen(self, part: Mapping[str, str]) -> list[Instance]:
        name = part[_INSTANCE]
        chosen = [i for i in self._instances() if name in (i.instance_id, str(i.target))]
        if not chosen:
            text = f"instance: expected the id or address of one of GET /instances, got {shown(name)}"
            raise NotFound(text, param=_INSTANCE)
        return chosen
