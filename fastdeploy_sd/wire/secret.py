"""The secret that all instances of a deployment share, and the keys that are derived from it. Knows no socket."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fastdeploy_sd.config import SplitwiseConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process.files import read_private

STATE_VARIABLE = "XDG_STATE_HOME"
_FILE_NAME = "pd_secret"
_NUM_BYTES = 32
_NUM_CHARS = 2 * _NUM_BYTES
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


def deployment_secret(config: SplitwiseConfig) -> bytes:
    """Return the secret: `pd_secret`, or that of a file in this user's state folder, which the first one to ask makes.
    ConfigError: the file cannot be made or read, is no secret, or is not this user's alone.
    """
    if config.pd_secret is not None:
        return config.pd_secret.encode()
    path = _state_folder() / _FILE_NAME
    try:
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from None


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Return 32 bytes that tell nothing of the secret, nor of the key of another purpose (HKDF-SHA256, RFC 5869)."""
    extracted = hmac.digest(b"fastdeploy_sd", secret, hashlib.sha256)
    return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)


def _state_folder() -> Path:
    chosen = os.environ.get(STATE_VARIABLE)
    return (Path(chosen) if chosen else Path.home() / ".local" / "state") / "fastdeploy_sd"


def _read(path: Path) -> bytes:
    text = read_private(path, _NUM_CHARS)
    if len(text) != _NUM_CHARS:
        raise OSError("another content")
    return text


def _make(path: Path) -> None:
    """Write a new secret, whole or not at all; of several that do so at once the first one's stays."""
    path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    draft = path.parent / f".{_FILE_NAME}.{secrets.token_hex(8)}"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE), "wb") as file:
            file.write(secrets.token_hex(_NUM_BYTES).encode())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _error(path: Path, got: str) -> ConfigError:
    return ConfigError(
        f"pd_secret: expected {path} to hold a secret that only this user can read, got {got}", param="pd_secret"
    )
