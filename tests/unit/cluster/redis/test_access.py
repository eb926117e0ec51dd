"""Getting into Redis: passwords from files, TLS with a real redis-server, and what is said when it does not work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.cluster.redis.store import Store, StoreDown, access_arguments
from fastdeploy_sd.config import RedisConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.metrics import RedisStats
from tests.doubles.certificates import Certificates, make_certificates
from tests.doubles.redis_server import PASSWORD, RedisServer, running_redis

pytestmark = pytest.mark.slow

WAIT_S = 120.0


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    path.chmod(0o600)
    return path


def test_a_password_is_the_line_of_a_private_file(password_file: Path) -> None:
    config = RedisConfig(password_file=str(password_file))
    assert access_arguments(config) == {"password": PASSWORD}
    for mode in (0o640, 0o604):
        password_file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"^scheduler_password_file: expected .* got .* with mode {mode:o}"):
            access_arguments(config)
    password_file.chmod(0o600)
    for content in (b"", b"\n", b"one\ntwo\n", b"\xff", b"x" * 5000):
        password_file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^scheduler_password_file: "):
            access_arguments(config)
    password_file.unlink()
    with pytest.raises(ConfigError, match=r"password: No such file"):
        access_arguments(config)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis"), certificates=certificates) as server:
        yield server


def full(redis: RedisServer, certificates: Certificates, **changes: Any) -> RedisConfig:
    options: dict[str, Any] = {
        "port": redis.port,
        "password": PASSWORD,
        "tls": True,
        "tls_ca_file": str(certificates.ca),
        "tls_cert_file": str(certificates.client),
        "tls_key_file": str(certificates.client_key),
    }
    return RedisConfig("splitwise", **(options | changes))


async def use(config: RedisConfig) -> None:
    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, store = num_files(), Store(config, RedisStats())
    try:
        await store.verify()
        await store.push("list", b"frame", 100.0)
        assert await store.take("list", 2) == [b"frame"]
    finally:
        await store.close()
        async with asyncio.timeout(WAIT_S):
            while num_files() > before:  # the two ends of TLS take leave of each other
                await asyncio.sleep(0.01)


def test_both_ends_prove_who_they_are(redis: RedisServer, certificates: Certificates) -> None:
    asyncio.run(use(full(redis, certificates)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tls_ca_file": None}, "scheduler_tls_ca_file: expected the authority of a certificate that names"),
        ({"host": "localhost"}, "scheduler_tls_ca_file: expected the authority of a certificate that names"),
        ({"password": "wrong"}, "scheduler_password: expected the password of Redis at rediss://127.0.0.1:"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_option(
    redis: RedisServer, certificates: Certificates, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(use(full(redis, certificates, **changes)))
    assert caught.value.message.startswith(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"tls_cert_file": None, "tls_key_file": None},
        {"tls": False, "tls_ca_file": None, "tls_cert_file": None, "tls_key_file": None},
    ],
)
def test_nobody_gets_in_without_a_certificate_or_without_tls(
    redis: RedisServer, certificates: Certificates, changes: dict[str, Any]
) -> None:
    """Redis hangs up, which may come before its reason does."""
    with pytest.raises((ConfigError, StoreDown)):
        asyncio.run(use(full(redis, certificates, **changes)))


def test_files_that_are_none_are_named(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, path in (("tls_ca_file", "missing"), ("tls_ca_file", "empty"), ("tls_cert_file", "empty")):
        config = RedisConfig("splitwise", tls=True, **{name: str(tmp_path / path)})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"^scheduler_{name}: expected a file that can be used, got .*{path}: "):
            Store(config, RedisStats())
    other = RedisConfig(
        "splitwise", tls=True, tls_cert_file=str(certificates.client), tls_key_file=str(certificates.server_key)
    )
    with pytest.raises(ConfigError, match=r"^scheduler_tls_cert_file: .*mismatch"):
        Store(other, RedisStats())
