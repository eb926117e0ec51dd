"""Certificates of a test's own authority, made with openssl's command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
subjectAltName = IP:127.0.0.1
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, and what it signed for a server at 127.0.0.1 and for a client."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and its certificates, valid for a day."""
    ca, ca_key = _make(folder, "authority", "-extensions", "authority")
    leaf = ("-extensions", "leaf", "-CA", str(ca), "-CAkey", str(ca_key))
    return Certificates(ca, *_make(folder, "server", *leaf), *_make(folder, "client", *leaf))


def _make(folder: Path, name: str, *arguments: str) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.fail("openssl is missing: install the distribution's package", pytrace=False)
    config, certificate, key = (folder / f"{name}.{kind}" for kind in ("conf", "pem", "key"))
    config.write_text(_CONFIG.format(name=name))
    command: list[str | Path] = [openssl, "req", "-x509", "-nodes", "-days", "1", "-config", config]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *arguments], check=True, capture_output=True)
    return certificate, key
