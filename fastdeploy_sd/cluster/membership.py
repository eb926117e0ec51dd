"""What instances know of one another, by whichever way they learn it. Knows no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.types import Adapter, KvDescription, ModelInfo
from fastdeploy_sd.types.models import mismatch

MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"
ROLES = (MIXED, PREFILL, DECODE)


@dataclass(frozen=True, slots=True)
class Member:
    """An instance of a deployment, which is an engine of a server: what does not change while it runs.

    Attributes:
        instance_id: one of `instance_ids` of this start of its server; another start has others.
        role: one of ROLES.
        fingerprint: instances with equal ones give the same bytes for the same request; "" = unknown.
        max_model_len: longest request, in tokens.
        kv_address: where it takes orders to compute KV, "tcp://host:port"; "" = nowhere.
        kv: what its KV is like; None = it neither computes KV for others nor takes any.
        adapters: LoRA adapters that it has loaded. They may change, other than the rest.
    """

    instance_id: str
    role: str
    fingerprint: str
    max_model_len: int
    kv_address: str
    kv: KvDescription | None
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def of(cls, config: Config, model: ModelInfo, instance_id: str, fingerprint: str) -> Self:
        role = config.splitwise.splitwise_role
        adapters = tuple(source.adapter for source in model.adapters)
        return cls(instance_id, role, fingerprint, model.max_request_tokens, model.kv_address, model.kv, adapters)

    @property
    def server(self) -> str:
        """What all instances of its server have in common, and no others."""
        return self.instance_id.partition(".")[0]

    @property
    def engine(self) -> int | None:
        """Its number among the engines of its server; None = there is one."""
        number = self.instance_id.partition(".")[2]
        return int(number) if number.isdecimal() else None

    @property
    def generates(self) -> bool:
        """Whether it answers clients."""
        return self.role != PREFILL

    @property
    def computes_kv(self) -> bool:
        """Whether it computes prompts' KV for decode instances."""
        return self.role == PREFILL and bool(self.kv_address)

    def has_adapter(self, digest: str) -> bool:
        """Whether it has loaded the adapter with a digest; "" = of a request without one."""
        return not digest or any(adapter.digest == digest for adapter in self.adapters)

    def kv_mismatch(self, source: Member) -> str | None:
        """Why this decode instance takes no KV of a prefill instance; None = it does."""
        if self.kv is None or source.kv is None:
            return "kv: expected a description of both instances' KV"
        return mismatch(self.kv, source.kv)


def instance_ids(server: str, num_engines: int) -> list[str]:
    """Return the names of a server's engines, given one of this start of the server, which has no dot."""
    return [server] if num_engines == 1 else [f"{server}.{number}" for number in range(num_engines)]


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """How busy an instance is.

    Attributes:
        takes_requests: False while it drains or its engine is silent.
        max_num_seqs: requests that it runs at once.
        num_blocks, num_available_blocks: KV blocks in all / without content or with content that no request uses.
    """

    takes_requests: bool = True
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    num_blocks: int = 0
    num_available_blocks: int = 0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or min(self.num_running, self.num_waiting) < 0:
            raise ValueError("load: expected counts that are not negative, and room for a request")

    @classmethod
    def of(cls, client: EngineClient) -> Self:
        try:
            client.verify_takes_requests()
            takes_requests = True
        except Unavailable:
            takes_requests = False
        stats = client.last_stats
        if stats is None:
            return cls(takes_requests)
        return cls(
            takes_requests=takes_requests,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_num_seqs=max(stats.max_num_seqs, 1),
            num_blocks=stats.num_blocks,
            num_available_blocks=stats.num_free_blocks + stats.num_cached_blocks,
        )

    @classmethod
    def total(cls, loads: Sequence[InstanceLoad]) -> InstanceLoad:
        """Return the sum of the loads of one server's engines; those that take no requests count as nothing."""
        if len(loads) == 1:
            return loads[0]
        able = [load for load in loads if load.takes_requests]
        counts = [sum(getattr(load, f.name) for load in able) for f in fields(cls)[1:]]
        return cls(True, *counts) if able else cls(takes_requests=False)

    @property
    def share(self) -> float:
        """Requests per place: below 1 a request runs at once."""
        return (self.num_running + self.num_waiting) / self.max_num_seqs
