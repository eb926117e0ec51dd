"""The options of sharing requests among instances through Redis."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fastdeploy_sd.config.option import Spec, option, options_of, verify_fields, wrong_value
from fastdeploy_sd.errors import shown

_LOCAL = "local"
_NAME_OPTION = "scheduler_name"


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Whether instances share their requests, and the Redis through which they do."""

    scheduler_name: Literal["local", "splitwise"] = option(
        _LOCAL,
        Spec(
            "Where a request runs: local: the instance that got it; splitwise: the one with the least load among those"
            " that use the same Redis and topic.",
            instead=(
                ("global", "splitwise shares the requests of mixed instances too, by load; use that"),
                ("dp", "there is no data parallelism within a server; use several servers and a router, or splitwise"),
            ),
        ),
    )
    host: str = option("127.0.0.1", Spec("Host of Redis.", name="scheduler_host"))
    port: int = option(6379, Spec("Port of Redis.", name="scheduler_port", minimum=1, maximum=65535))
    db: int = option(0, Spec("Number of the database in Redis.", name="scheduler_db", minimum=0))
    password: str | None = option(None, Spec("Password of Redis.", name="scheduler_password", secret=True))
    topic: str = option(
        "default",
        Spec(
            "What every key in Redis begins with; instances see those of the same topic only. Letters, digits and . _"
            " : -, at most 64.",
            name="scheduler_topic",
        ),
    )
    ttl_s: int = option(
        900,
        Spec(
            "Seconds a request at another instance may go without a new token; then it ends with an error.",
            name="scheduler_ttl",
            minimum=1,
        ),
    )
    sync_period_ms: int = option(
        5,
        Spec(
            "Milliseconds for which the known load of the instances is used before it is read from Redis again.",
            name="scheduler_sync_period",
            minimum=1,
            maximum=60000,
        ),
    )
    expire_period_ms: int = option(
        3000,
        Spec(
            "Milliseconds without a heartbeat after which an instance gets no more requests; after twice that what it"
            " had goes on elsewhere.",
            name="scheduler_expire_period",
            minimum=300,
            maximum=600000,
        ),
    )
    reader_batch_size: int = option(
        200,
        Spec("Messages taken from Redis at once.", name="scheduler_reader_batch_size", minimum=1, maximum=10000),
    )
    writer_batch_size: int = option(
        200,
        Spec("Outputs of requests in one message.", name="scheduler_writer_batch_size", minimum=1, maximum=10000),
    )

    password_file: str | None = option(
        None,
        Spec(
            "File with the password of Redis in one line, which only this user can read; in place of"
            " scheduler_password, since command lines are public.",
            name="scheduler_password_file",
        ),
    )
    tls: bool = option(
        False,
        Spec("Speak TLS with Redis, whose certificate must name `scheduler_host`.", name="scheduler_tls"),
    )
    tls_ca_file: str | None = option(
        None,
        Spec(
            "File (PEM) of the authorities that sign the certificate of Redis; none: those of this system.",
            name="scheduler_tls_ca_file",
        ),
    )
    tls_cert_file: str | None = option(
        None,
        Spec(
            "File (PEM) of the certificate to show to a Redis that asks for one (tls-auth-clients).",
            name="scheduler_tls_cert_file",
        ),
    )
    tls_key_file: str | None = option(
        None,
        Spec("File (PEM) of its key; none: it is in the same file.", name="scheduler_tls_key_file"),
    )

    def __post_init__(self) -> None:
        verify_fields(self, "redis")
        if self.password is not None and self.password_file is not None:
            raise wrong_value("scheduler_password_file", "none with scheduler_password", "one")
        for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if getattr(self, name) is not None and not self.tls:
                raise wrong_value(f"scheduler_{name}", "none without scheduler_tls", "one")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise wrong_value("scheduler_tls_key_file", "one with scheduler_tls_cert_file only", "one without")
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", self.topic):
            raise wrong_value("scheduler_topic", "1 to 64 letters, digits and . _ : -", shown(self.topic))

    @property
    def is_shared(self) -> bool:
        """Whether requests may run at other instances."""
        return self.scheduler_name != _LOCAL


def idle_notes(given: Iterable[str], config: RedisConfig) -> list[str]:
    """Return a line for the log about the options among `given` that nothing reads with this scheduler_name."""
    names = {opt.name for opt in options_of(RedisConfig, "redis")} - {_NAME_OPTION}
    idle = [] if config.is_shared else [name for name in given if name in names]
    return [f"{', '.join(idle)}: accepted without effect: it belongs to scheduler_name splitwise"] if idle else []
