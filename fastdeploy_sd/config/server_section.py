"""The options of the HTTP side: addresses, keys, limits and timeouts. Rules between options are in rules.py."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastdeploy_sd.config.option import Spec, option, options_of, verify_fields
from fastdeploy_sd.errors import ConfigError

_ROUTER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):(\d{1,5})")
_MAX_PORT = 65535
_OF_PAGES = ("allowed_methods", "allowed_headers", "allow_credentials")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", Spec("The one address to listen on; 0.0.0.0 is every IPv4 address."))
    port: int = option(8000, Spec("TCP port.", minimum=0, maximum=65535))
    metrics_port: int | None = option(
        None,
        Spec(
            "A second port, which answers /metrics, /config-info, /health, /ping, /live and /ready only; none: these"
            " are on `port` alone, where they always are.",
            minimum=0,
            maximum=65535,
        ),
    )
    router: tuple[str, ...] = option(
        (),
        Spec(
            "Routers to register with, each `HOST:PORT`, one per flag or with commas; each may send requests from then"
            " on. Without `pd_secret` only on this machine.",
            comma_separated=True,
        ),
    )
    workers: int = option(1, Spec("HTTP processes sharing the port.", minimum=1, maximum=64))
    api_key: tuple[str, ...] = option(
        (),
        Spec(
            "Accepted bearer tokens of visible ASCII characters, one per flag; without any the API is open.",
            secret=True,
        ),
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        Spec(
            "Web pages that may call the API from a browser, by origin as `https://chat.example`, one per flag; `*`:"
            " any. Without `api_key`, pages of other origins are refused.",
            takes_json_lists=True,
        ),
    )
    allowed_methods: tuple[str, ...] = option(
        ("GET", "HEAD", "POST"),
        Spec("HTTP methods that those pages may use, one per flag; `*`: any.", takes_json_lists=True),
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), Spec("Headers that those pages may send, one per flag; `*`: any.", takes_json_lists=True)
    )
    allow_credentials: bool = option(
        False,
        Spec(
            "Let those pages send cookies and HTTP logins, as a proxy in front may ask for; keys in `Authorization`"
            " need no such thing. Not with `*` as an origin."
        ),
    )
    web_page: bool = option(
        True,
        Spec(
            "Show browsers a page at `/`: a chat, and the server's numbers. It asks for the API key where there is one."
        ),
    )
    access_log: bool = option(
        False,
        Spec(
            "Log a line for each HTTP request: client, method, path, status, duration, error, id, model, tokens, gain.",
            aliases=("enable_log_requests",),
        ),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        Spec(
            "URL of an OpenTelemetry collector that takes traces by OTLP over HTTP, as `http://127.0.0.1:4318`; without"
            " a path it is `/v1/traces`. Each POST request is a span, with its stages and drafts."
        ),
    )
    enable_force_include_usage: bool = option(
        False, Spec("End every stream with its usage, as if each request had `stream_options.include_usage`.")
    )
    max_concurrency: int | None = option(
        None,
        Spec("Requests in the server at once, running and waiting; sets `max_num_queued_requests`.", minimum=2),
    )
    max_body_bytes: int = option(
        16 << 20, Spec("Largest request body, in bytes; more is answered with 413.", minimum=1)
    )
    max_connections: int = option(
        4096,
        Spec(
            "Open connections of each HTTP process; a further one takes the place of the one idle for longest, or is"
            " answered with 503. Fewer where the limit of open files leaves no room.",
            minimum=1,
        ),
    )
    max_connections_per_address: int | None = option(
        1024,
        Spec(
            "Open connections of each HTTP process from one client address (of IPv6: /64 network); more are answered"
            " with 503. none: no limit, for servers that a proxy fronts.",
            minimum=1,
        ),
    )
    headers_timeout_s: float = option(
        10.0,
        Spec(
            "Seconds a connection may take to send the headers of a request; then it is closed.",
            name="timeout_headers",
            minimum=0.1,
        ),
    )
    body_timeout_s: float = option(
        30.0,
        Spec(
            "Seconds a request's body may pause; longer, or after this time slower than 1 KiB/s, is answered with 408.",
            name="timeout_body",
            minimum=0.1,
        ),
    )
    keep_alive_timeout_s: int = option(
        5,
        Spec("Seconds a connection may idle between two requests.", name="timeout_keep_alive", minimum=1),
    )
    engine_timeout_s: float = option(
        30.0,
        Spec(
            "Seconds the engine may neither answer nor work; then it hangs, all requests end with an error, and the"
            " server ends with status 1. One of several engines is started again; new requests wait as long for one"
            " when none is up. With several ranks at least twice timeout_rank.",
            name="timeout_engine",
            minimum=0.1,
        ),
    )
    shutdown_timeout_s: float = option(
        30.0,
        Spec(
            "Seconds that running requests may take to finish after SIGTERM.",
            name="timeout_graceful_shutdown",
            minimum=0,
        ),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "server")
        _verify_api_keys(self.api_key)
        _verify_origins(self.allowed_origins)
        _verify_pages(self)
        _verify_routers(self.router)
        _verify_collector(self.otlp_traces_endpoint)


def _verify_api_keys(keys: tuple[str, ...]) -> None:
    """Other characters reach a server in a different form from each client."""
    if not all(re.fullmatch(r"[!-~]+", key) for key in keys):
        raise ConfigError("api_key: expected visible ASCII characters without spaces, got others", param="api_key")


def _verify_origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
            raise ConfigError(
                f"allowed_origins: expected '*' or an origin as 'https://chat.example', got {origin!r}",
                param="allowed_origins",
            )


def _verify_collector(url: str | None) -> None:
    if url is not None and not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", url):
        raise ConfigError(
            f"otlp_traces_endpoint: expected a URL as 'http://127.0.0.1:4318', got {url!r}",
            param="otlp_traces_endpoint",
        )


def _verify_pages(server: ServerConfig) -> None:
    """What pages may do means something where there are pages; and no stranger's page may act as its visitor."""
    if server.allow_credentials and "*" in server.allowed_origins:
        raise ConfigError(
            "allow_credentials: expected false with the origin '*', or origins by name, got true",
            param="allow_credentials",
        )
    for opt in options_of(ServerConfig, "server") if not server.allowed_origins else ():
        if opt.name in _OF_PAGES and getattr(server, opt.field_name) != opt.default:
            raise ConfigError(f"{opt.name}: expected it with allowed_origins only, got it alone", param=opt.name)


def _verify_routers(routers: tuple[str, ...]) -> None:
    for router in routers:
        match = _ROUTER.fullmatch(router)
        if match is None or not 0 < int(match[2]) <= _MAX_PORT:
            raise ConfigError(
                f"router: expected an address as '127.0.0.1:9000' or '[::1]:9000', got {router!r}", param="router"
            )
