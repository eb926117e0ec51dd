"""Store: lists of frames and a table of records in Redis, under keys of one topic. The only file that imports redis.

Each method is one round trip, has a deadline and is never repeated by the client library: whether a command whose
answer was lost has been carried out is unknown, and the callers' messages are made for that. Frames are opaque here.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError

from fastdeploy_sd.config import RedisConfig
from fastdeploy_sd.errors import ConfigError, Unavailable
from fastdeploy_sd.metrics import RedisStats
from fastdeploy_sd.process.files import read_private

T = TypeVar("T")

# Redis answers in a fraction of a millisecond; one that takes longer than this is as good as gone.
_ANSWER_S = 2.0
_WAIT_S = 1.0
_CANCEL_S = 0.1
_MS = 1000
_MAX_PASSWORD_BYTES = 4096
_LOGIN_FAULTS = ("WRONGPASS", "NOAUTH", "invalid password", "invalid username", "called without any password")


class StoreDown(Unavailable):
    """Redis did not do what it was asked for, or it is unknown whether it did."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Redis: {reason}", code="redis_down")


class Store:
    """A connection pool of one event loop, for keys that begin with the topic. `close` it at the end."""

    def __init__(self, config: RedisConfig, stats: RedisStats) -> None:
        self.stats = stats
        self._topic = config.topic
        self._address = f"{'rediss://' if config.tls else ''}{config.host}:{config.port}"
        access = access_arguments(config)
        self._redis = _connection(config, access, _ANSWER_S)
        self._waiting = _connection(config, access, _ANSWER_S + _WAIT_S)
        self._asking: set[asyncio.Future[Any]] = set()

    def key(self, name: str) -> str:
        return f"{self._topic}.{name}"

    async def verify(self) -> None:
        """Raise ConfigError if Redis answers, but not to us, and StoreDown if it does not answer."""
        try:
            await _typed(self._redis.ping())
        except (AuthenticationError, AuthorizationError) as error:
            raise ConfigError(
                f"scheduler_password: expected the password of Redis at {self._address}, got another one or none:"
                f" {error}",
                param="scheduler_password",
            ) from None
        except ResponseError as error:
            name = "scheduler_password" if any(text in str(error) for text in _LOGIN_FAULTS) else "scheduler_db"
            text = f"{name}: expected one that Redis at {self._address} takes, got its error: {error}"
            raise ConfigError(text, param=name) from None
        except _FAILURES as error:
            self._verify_tls(error)
            raise self._down(error) from None

    def _verify_tls(self, error: Exception) -> None:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return
        if isinstance(cause, ssl.SSLCertVerificationError):
            name, expected = "scheduler_tls_ca_file", "the authority of a certificate that names scheduler_host"
        elif "CERTIFICATE" in str(cause.reason):
            name, expected = "scheduler_tls_cert_file", "a certificate that Redis accepts"
        else:
            name, expected = "scheduler_tls", "a Redis that speaks TLS"
        raise ConfigError(f"{name}: expected {expected} at {self._address}, got: {cause}", param=name) from None

    async def push(self, name: str, frame: bytes, ttl_s: float) -> int:
        """Append a frame to a list, which vanishes when nothing is appended for `ttl_s`; return its length now."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.rpush(self.key(name), frame)
        pipe.pexpire(self.key(name), math.ceil(ttl_s * _MS))
        length, _ = await self._do("push", pipe.execute())
        self.stats.num_bytes["pushed"] += len(frame)
        return int(length)

    async def withdraw(self, name: str, frame: bytes) -> bool:
        """Take a frame that was just appended back; False when it has been taken already."""
        return bool(await self._do("withdraw", _typed(self._redis.lrem(self.key(name), -1, cast(Any, frame)))))

    async def take(self, name: str, count: int) -> list[bytes]:
        """Remove and return up to `count` frames from a list's beginning; waits for the first one, a second at most."""
        pipe = self._waiting.pipeline(transaction=False)
        pipe.blpop([self.key(name)], timeout=_WAIT_S)
        if count > 1:
            pipe.lpop(self.key(name), count - 1)
        first, *rest = await self._do("take", pipe.execute())
        frames = [] if first is None else [first[1], *((rest and rest[0]) or [])]
        self.stats.num_bytes["taken"] += sum(map(len, frames))
        return frames

    async def write_record(self, table: str, name: str, record: bytes, ttl_s: float) -> None:
        """Set a table's entry; the table vanishes when nothing is written for `ttl_s`."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hset(self.key(table), name, cast(Any, record))
        pipe.pexpire(self.key(table), math.ceil(ttl_s * _MS))
        await self._do("write_record", pipe.execute())

    async def read_records(self, table: str) -> tuple[dict[str, bytes], float]:
        """Return a table, and the time by Redis's clock, which all instances share, in seconds."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hgetall(self.key(table))
        pipe.time()
        records, (seconds, micros) = await self._do("read_records", pipe.execute())
        named = {name.decode(errors="replace"): bytes(record) for name, record in records.items()}
        return named, seconds + micros / 1e6

    async def remove_records(self, table: str, names: list[str]) -> None:
        await self._do("remove_records", _typed(self._redis.hdel(self.key(table), *names)))

    async def remove(self, name: str) -> None:
        await self._do("remove", _typed(self._redis.unlink(self.key(name))))

    def _note_end(self, asking: asyncio.Future[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # no other task may be left to read it

    async def close(self) -> None:
        await end_tasks(self._asking)
        for connection in (self._redis, self._waiting):
            await connection.aclose()

    async def _do(self, purpose: str, answer: Awaitable[T]) -> T:
        """Wait for an answer in a task of its own: a cancellation that the client library swallows ends the caller."""
        self.stats.round_trips[purpose] += 1
        asking = asyncio.ensure_future(answer)
        self._asking.add(asking)
        asking.add_done_callback(self._note_end)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        except _FAILURES as error:
            self.stats.errors[_kind(error)] += 1
            raise self._down(error) from None

    def _down(self, error: Exception) -> StoreDown:
        text = str(error).strip() or type(error).__name__
        return StoreDown(f"{self._address}: {text}")


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks that use a Store, until they have ended: the client library may swallow a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_S)
        ended = {task for task in left if task.done()}
        left -= ended
        await asyncio.gather(*ended, return_exceptions=True)


_FAILURES = (RedisError, OSError, TimeoutError, ValueError)


def _kind(error: Exception) -> str:
    if isinstance(error, (redis.exceptions.TimeoutError, TimeoutError)):
        return "timeout"
    if isinstance(error, (ResponseError, AuthenticationError, AuthorizationError)):
        return "refused"
    return "connection" if isinstance(error, (redis.exceptions.ConnectionError, OSError)) else "answer"


def _connection(config: RedisConfig, access: dict[str, Any], timeout_s: float) -> redis.asyncio.Redis:
    return redis.asyncio.Redis(
        host=config.host,
        port=config.port,
        db=config.db,
        socket_timeout=timeout_s,
        socket_connect_timeout=_ANSWER_S,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        client_name="fastdeploy_sd",
        **access,
    )


def _typed(answer: Any) -> Awaitable[Any]:
    """The library declares the results of one command for callers with and without an event loop."""
    return cast(Awaitable[Any], answer)


def access_arguments(config: RedisConfig) -> dict[str, Any]:
    """Return the arguments of redis-py's client that say how to get in; ConfigError names a file that is of no use."""
    arguments: dict[str, Any] = {"password": _password(config)}
    if config.tls:
        _verify_files(config)
        arguments |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            "ssl_ca_certs": config.tls_ca_file,
            "ssl_certfile": config.tls_cert_file,
            "ssl_keyfile": config.tls_key_file,
        }
    return arguments


def _password(config: RedisConfig) -> str | None:
    if config.password_file is None:
        return config.password
    try:
        text = read_private(Path(config.password_file), _MAX_PASSWORD_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "other bytes than UTF-8"
        raise _error("password_file", config.password_file, why) from None
    lines = text.splitlines()
    if len(lines) != 1 or not lines[0]:
        raise _error("password_file", config.password_file, f"expected one line, got {len(lines)}")
    return lines[0]


def _verify_files(config: RedisConfig) -> None:
    """Load them as a connection will, so that what is wrong is told once, at the start."""
    if config.tls_ca_file is not None:
        try:
            ssl.create_default_context().load_verify_locations(config.tls_ca_file)
        except (OSError, ValueError) as error:
            raise _error("tls_ca_file", config.tls_ca_file, _reason(error)) from None
    if config.tls_cert_file is not None:
        try:
            ssl.create_default_context().load_cert_chain(config.tls_cert_file, config.tls_key_file, password=_refuse)
        except (OSError, ValueError) as error:
            raise _error("tls_cert_file", config.tls_cert_file, _reason(error)) from None


def _refuse() -> str:
    """OpenSSL would ask on the terminal otherwise."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _error(field: str, path: str, why: str) -> ConfigError:
    name = f"scheduler_{field}"
    return ConfigError(f"{name}: expected a file that can be used, got {path}: {why}", param=name)
