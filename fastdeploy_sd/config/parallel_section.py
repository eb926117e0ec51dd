"""The options of several processes that compute one model."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from fastdeploy_sd.config.addresses import is_bindable
from fastdeploy_sd.config.eplb import EplbConfig, read_eplb
from fastdeploy_sd.config.option import Spec, option, verify_fields, wrong_value

_MAX_PORT = 65535
# Above node_port: the first at which the commands that share experts connect.
_EXPERT_PORT = 2


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What a server's other models have on this host: engines before and after this model's, and ranks before them."""

    engines_before: int = 0
    engines_after: int = 0
    ranks_before: int = 0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How the model is shared out among processes."""

    tensor_parallel_size: int = option(
        1,
        Spec(
            "Processes (ranks) that compute the model together: each has its share of every layer's weights, of the KV"
            " cache and of the cores. The tokens are the same for every size.",
            choices=(1, 2, 4),
        ),
    )
    enable_expert_parallel: bool = option(
        False,
        Spec(
            "Spread the experts of every layer over all ranks: each has whole experts, and computes them for the tokens"
            " of all ranks. Needs a model with experts. The tokens are the same either way."
        ),
    )
    enable_eplb: bool = option(
        False,
        Spec(
            "Move experts between ranks, so that each computes as many rows. Needs enable_expert_parallel. The tokens"
            " are the same either way."
        ),
    )
    eplb_config: EplbConfig | None = option(  # noqa: RUF009 (makes a field)
        None,
        Spec(
            "Of enable_eplb: redundant_experts_num (0), slots of each layer for further copies of experts, and"
            " redundant_expert_dump_workload_interval (10), seconds between two looks at the rows of each expert;"
            " redundant_expert_api_user and redundant_expert_api_password, what the routes about experts ask for.",
            read_map=read_eplb,
        ),
    )
    data_parallel_size: int = option(
        1,
        Spec(
            "Engines of this server. Each has its own KV cache, its own tensor_parallel_size ranks, and an equal part"
            " of the cores and of the memory, or GPUs of its own; a request runs at one of them, and goes on at another"
            " one should that be lost. On a CPU they have one copy of the weights for each memory node.",
            minimum=1,
            maximum=64,
        ),
    )
    local_data_parallel_id: int | None = option(
        None,
        Spec(
            "The only one of the data_parallel_size engines that this command starts, from 0; the others' parts of"
            " this machine are left to them. none: it starts all of them.",
            minimum=0,
        ),
    )
    rank_timeout_s: float = option(
        10.0,
        Spec(
            "Seconds in which no rank computes although a step waits for one; then that one hangs, all requests end"
            " with an error, and the server ends with status 1.",
            name="timeout_rank",
            minimum=0.1,
        ),
    )

    ips: tuple[str, ...] = option(
        (),
        Spec(
            "Numeric addresses of the hosts (nodes) that share the ranks, with commas. The same command is started on"
            " each. The first one serves HTTP, and the others report there; with data_parallel_size each serves its own"
            " engines. none: one host.",
            comma_separated=True,
        ),
    )
    node_rank: int | None = option(
        None, Spec("This host's place in `ips`, from 0; none: it is found by its address.", minimum=0)
    )
    node_port: int = option(
        8010,
        Spec(
            "TCP port of the first of `ips` at which the others report; the next port carries what ranks exchange"
            " inside a step, and those from the one after on, at every address but the last, rows for experts.",
            minimum=1,
            maximum=_MAX_PORT - 1,
        ),
    )
    node_timeout_s: float = option(
        300.0, Spec("Seconds in which all of `ips` must have reported at start.", name="timeout_nodes", minimum=1)
    )
    neighbours: Neighbours = field(default=Neighbours())
    # Of the memory over which engines of one command share packed weights, for each process to open; None = none.
    weights_file: str | None = field(default=None)

    def __post_init__(self) -> None:
        verify_fields(self, "parallel")
        hosts = [_address(text) for text in self.ips]
        if self.data_parallel_size > 1 and hosts and not self.enable_expert_parallel:
            text = "1 together with ips, unless enable_expert_parallel"
            raise wrong_value("data_parallel_size", text, self.data_parallel_size)
        if self.enable_eplb and not self.enable_expert_parallel:
            raise wrong_value("enable_eplb", "false without enable_expert_parallel", "true")
        if self.eplb_config is not None and not self.enable_eplb:
            raise wrong_value("eplb_config", "none without enable_eplb", "a map")
        if self.local_data_parallel_id is not None and self.local_data_parallel_id >= self.data_parallel_size:
            raise wrong_value(
                "local_data_parallel_id",
                f"a number up to {self.data_parallel_size - 1}, as data_parallel_size is {self.data_parallel_size}",
                self.local_data_parallel_id,
            )
        if len(set(hosts)) != len(hosts):
            raise wrong_value("ips", "every address once", ",".join(self.ips))
        if len({host.is_loopback for host in hosts}) > 1:
            raise wrong_value("ips", "addresses that all hosts can reach", ",".join(self.ips))
        if self.node_rank is not None and self.node_rank >= self.num_hosts:
            raise wrong_value(
                "node_rank", f"a number up to {self.num_hosts - 1}, as ips has {len(hosts)}", self.node_rank
            )

    @property
    def num_local_engines(self) -> int:
        """Number of engines that this command starts."""
        return self.engines_per_host if self.local_data_parallel_id is None else 1

    @property
    def engines_per_host(self) -> int:
        """Number of this model's engines on each host."""
        return max(1, self.data_parallel_size // self.num_hosts)

    @property
    def engines_on_host(self) -> int:
        """Number of all models' engines on this host, which share its memory and processors."""
        return self.neighbours.engines_before + self.engines_per_host + self.neighbours.engines_after

    @property
    def place_on_host(self) -> int:
        """This engine's place among `engines_on_host`."""
        return self.neighbours.engines_before + (self.local_data_parallel_id or 0) % self.engines_per_host

    @property
    def first_engine(self) -> int:
        """Number of the first engine that this command starts; raises ConfigError as `own_host`."""
        if self.local_data_parallel_id is not None:
            return self.local_data_parallel_id
        return self.own_host() * self.engines_per_host if self.data_parallel_size > 1 else 0

    @property
    def first_rank(self) -> int:
        """Number of this engine's rank 0 among the ranks of all engines, which is that of its GPU too."""
        return self.neighbours.ranks_before + self.expert_rank(0)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return max(1, len(self.ips))

    @property
    def num_nodes(self) -> int:
        """Number of hosts that share the ranks of one engine; of several engines each is on one host."""
        return self.num_hosts if self.data_parallel_size == 1 else 1

    @property
    def ranks_per_node(self) -> int:
        """Number of an engine's ranks on each of its hosts."""
        return self.tensor_parallel_size // self.num_nodes

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which experts are spread; 1 = they are not."""
        return self.data_parallel_size * self.tensor_parallel_size if self.enable_expert_parallel else 1

    @property
    def eplb(self) -> EplbConfig | None:
        """How experts are balanced; None = they stay where they are."""
        return (self.eplb_config or EplbConfig()) if self.enable_eplb and self.expert_ranks > 1 else None

    @property
    def shares_experts(self) -> bool:
        """Whether engines need one another's experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def expert_places(self) -> tuple[tuple[str, int], ...]:
        """Address and port at which each command's ranks give rows to those of the others; they have as many each."""
        if self.expert_ranks == 1:
            return ()
        count = self.num_hosts if self.local_data_parallel_id is None else self.data_parallel_size
        per_host, ips = count // self.num_hosts, self.ips or ("127.0.0.1",)
        return tuple((ips[i // per_host], self.node_port + _EXPERT_PORT + i % per_host) for i in range(count))

    def own_expert_place(self) -> int:
        """Return this command's place in `expert_places`; raises ConfigError as `own_host`."""
        return self.own_host() if self.local_data_parallel_id is None else self.local_data_parallel_id

    def expert_rank(self, rank: int) -> int:
        """Return the number of a tensor-parallel rank of this engine among those over which experts are spread."""
        return (self.local_data_parallel_id or 0) * self.tensor_parallel_size + rank

    @property
    def is_local(self) -> bool:
        """Whether no byte between ranks leaves this machine."""
        return all(_address(text).is_loopback for text in self.ips)

    def own_node(self) -> int:
        """Return this host's place among those of its engine; raises ConfigError as `own_host`."""
        return self.own_host() if self.num_nodes > 1 else 0

    def own_host(self) -> int:
        """Return this host's place in `ips`, 0 where there is none.

        Raises ConfigError: `node_rank` does not say it, and this host has none or several of the addresses.
        """
        if self.node_rank is not None or self.num_hosts == 1:
            return self.node_rank or 0
        own = [node for node, text in enumerate(self.ips) if is_bindable(text)]
        if len(own) != 1:
            got = f"{len(own)} of them: say which" if own else "none"
            raise wrong_value("node_rank", f"one of {', '.join(self.ips)} to be this host's address", got)
        return own[0]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise wrong_value("ips", "numeric addresses", repr(text)) from None
    if address.is_unspecified or address.is_multicast:
        raise wrong_value("ips", "addresses of one host each", repr(text))
    return address
