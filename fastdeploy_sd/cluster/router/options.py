"""The options of a router and the command line they come from. Knows no router.

Those about HTTP are a server's, with their text and limits; only the port's default is another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_sd.config import ServerConfig, SplitwiseConfig
from fastdeploy_sd.config.command_line import read_flags
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.help_text import add_flag
from fastdeploy_sd.config.option import Option, Spec, option, options_of, verify_fields
from fastdeploy_sd.errors import ConfigError

_OF_SERVERS = (
    "host",
    "port",
    "api_key",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allow_credentials",
    "web_page",
    "access_log",
    "otlp_traces_endpoint",
    "max_body_bytes",
    "max_connections",
    "max_connections_per_address",
    "timeout_headers",
    "timeout_body",
    "timeout_keep_alive",
    "timeout_graceful_shutdown",
)
_PORT = 9000
_HELP = frozenset({"-h", "--help"})


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How requests find instances."""

    splitwise: bool = option(
        False,
        Spec(
            "Take prefill and decode instances only, and refuse mixed ones; otherwise all are taken, and each request"
            " goes where it fits."
        ),
    )
    request_timeout_s: float = option(
        1800.0,
        Spec(
            "Seconds a request may take in all; then it ends with an error.",
            name="request_timeout_secs",
            aliases=("timeout_request",),
            minimum=0.1,
        ),
    )
    connect_timeout_s: float = option(
        3.0, Spec("Seconds a connection to an instance may take to come about.", name="timeout_connect", minimum=0.01)
    )
    silent_s: float = option(
        3.0,
        Spec("Seconds without a heartbeat after which an instance gets nothing new.", name="timeout_silent", minimum=1),
    )
    lost_s: float = option(
        10.0,
        Spec(
            "Seconds without a heartbeat after which the requests of an instance go on at others.",
            name="timeout_lost",
            minimum=1,
        ),
    )
    resume_s: float = option(
        10.0,
        Spec(
            "Seconds a stream whose instance failed waits for another one that can go on; then it ends with an error.",
            name="timeout_resume",
            minimum=0,
        ),
    )
    max_attempts: int = option(
        3, Spec("Instances that a request may be given to, one after the other, when they fail.", minimum=1)
    )
    instance_api_key: str | None = option(
        None,
        Spec("Bearer token for the instances in place of the client's own, which is passed on otherwise.", secret=True),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "routing")
        if self.lost_s < self.silent_s:
            raise ConfigError(
                f"timeout_lost: expected at least timeout_silent ({self.silent_s:g}), got {self.lost_s:g}",
                param="timeout_lost",
            )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A router: its HTTP side, how it routes, and of splitwise only `pd_secret`."""

    server: ServerConfig = field(default_factory=lambda: ServerConfig(port=_PORT))
    splitwise: SplitwiseConfig = field(default_factory=SplitwiseConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)


_SECTIONS: dict[str, type] = {"server": ServerConfig, "splitwise": SplitwiseConfig, "routing": RoutingConfig}
OPTIONS: tuple[Option, ...] = (
    *options_of(RoutingConfig, "routing"),
    *(opt for opt in options_of(SplitwiseConfig, "splitwise") if opt.name == "pd_secret"),
    *(opt for opt in options_of(ServerConfig, "server") if opt.name in _OF_SERVERS),
)
_BY_NAME = {opt.name: opt for opt in OPTIONS}


def read_router_options(argv: Sequence[str], prog: str) -> RouterConfig:
    """Return the configuration of a command line; a ConfigError names all that cannot be honoured. --help exits."""
    if not _HELP.isdisjoint(argv):
        print(_help_text(prog), end="")
        raise SystemExit(0)
    faults = Faults()
    values = read_flags(argv, OPTIONS, "a router's", faults)
    faults.raise_all()
    return make_router_config(**values)


def make_router_config(**values: Any) -> RouterConfig:
    """Return the configuration of options by their names; those that are missing have their defaults."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    sections["server"]["port"] = _PORT
    for name, value in values.items():
        opt = _BY_NAME[name]
        sections[opt.section][opt.field_name] = value
    return RouterConfig(**{name: cls(**sections[name]) for name, cls in _SECTIONS.items()})


def default_of(opt: Option) -> object:
    """Return a router's default of an option, which may be another than a server's."""
    return getattr(getattr(RouterConfig(), opt.section), opt.field_name)


def _help_text(prog: str) -> str:
    parser = argparse.ArgumentParser(
        prog,
        usage="%(prog)s [OPTION...]",
        description="Give requests to the instances that register here (serve --router HOST:PORT).",
        epilog="Dashes and underscores are the same in flags.",
        add_help=False,
    )
    groups = {section: parser.add_argument_group(section) for section in ("routing", "splitwise", "server")}
    for opt in OPTIONS:
        add_flag(groups[opt.section], opt, default_of(opt))
    return parser.format_help()
