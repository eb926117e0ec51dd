"""How to get into Redis: the password and TLS, from the options and the files that they name. Imports no redis."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from fastdeploy_sd.config import RedisConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process.files import read_private

_MAX_PASSWORD_BYTES = 4096


def access_arguments(config: RedisConfig) -> dict[str, Any]:
    """Return the arguments of redis-py's client that say how to get in.

    Raises:
        ConfigError: a file cannot be used; the text names the option.
    """
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
