"""Builds and loads the Paddle bindings: compiled against the installed Paddle at first use, then cached.

A source file per op group becomes one shared object that registers `fdsd_*` operators with Paddle and calls the kernel
library. The cache key covers the sources, the headers, Paddle's version and the compiler, so an upgrade of any of them
rebuilds; a file lock makes processes that start together build once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paddle
from paddle import _C_ops
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops import library
from fastdeploy_sd.ops.recorder import recorder_of

# -w: Paddle's own headers warn; ours are compiled with -Werror in the kernel library.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w")


def source_root() -> pathlib.Path:
    """Return the folder that holds bindings/ and include/: the checkout's custom_ops, or the copy in the wheel."""
    package = pathlib.Path(__file__).resolve().parent.parent
    for root in (package.parent / "custom_ops", package / "csrc"):
        if (root / "bindings" / "paddle_binding.h").exists():
            return root
    raise ConfigError(f"op bindings: expected sources beside {package}, found none; reinstall fastdeploy_sd")


def cache_folder() -> pathlib.Path:
    """Return where built bindings are kept: $FDSD_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("FDSD_CACHE_DIR")
    base = pathlib.Path(chosen) if chosen else pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return base / "fastdeploy_sd"


def _inputs(root: pathlib.Path) -> Iterator[pathlib.Path]:
    yield from sorted((root / "bindings").glob("paddle_*"))
    yield from sorted((root / "include" / "fdsd").iterdir())


def _cache_key(root: pathlib.Path, compiler: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    identity = (paddle.__version__, paddle.version.commit, str(library.LIBRARY_PATH), *FLAGS)
    for part in (version, *(text.encode() for text in identity)):
        digest.update(part + b"\0")
    for path in _inputs(root):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"op bindings: `{' '.join(command)}` failed:\n{done.stderr[-4000:]}")


def _build(root: pathlib.Path, compiler: str, out: pathlib.Path) -> None:
    paddle_root = pathlib.Path(paddle.__file__).parent
    includes = [root / "include", root / "bindings", paddle_root / "include", paddle_root / "include" / "third_party"]
    sources = sorted((root / "bindings").glob("paddle_*.cc"))
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, *(f"-I{include}" for include in includes), "-c", str(source), "-o", obj]
            for source, obj in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # Paddle loads its libraries with local visibility, so the bindings must name them to find their symbols.
        folders = (paddle_root / "libs", paddle_root / "base", library.LIBRARY_PATH.parent)
        links = [flag for path in folders for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        names = ["libphi_core.so", "libphi.so", "libcommon.so", "libpaddle.so", library.LIBRARY_PATH.name]
        present = [f"-l:{name}" for name in names if any((path / name).exists() for path in folders)]
        built = f"{folder}/bindings.so"
        _run([compiler, "-shared", *objects, *links, *present, "-o", built])
        os.replace(built, out)


@functools.cache
def load() -> None:
    """Make the `fdsd_*` operators available to Paddle; builds them when no cached build fits.

    Raises:
        ConfigError: no C++ compiler, a failed build, or a missing kernel library.
    """
    library.library()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ConfigError("op bindings: expected a C++ compiler (g++) on PATH, found none; install g++")
    root, folder = source_root(), cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"bindings-{_cache_key(root, compiler)}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            _build(root, compiler, out)
    load_op_meta_info_and_register_op(str(out))


def run(name: str, *args: Any) -> list[Any]:
    """Call operator `fdsd_<name>`: input tensors (None for an absent optional one), then attributes.

    With a symbolic tensor among the inputs the call is recorded instead; see ops/recorder.py.

    Raises:
        ValueError: the operator refused its arguments.
        RecordingError: the operator cannot be recorded.
    """
    recorder = recorder_of(args)
    if recorder is not None:
        return recorder.run(name, args)
    load()
    out: list[Any] = _C_ops._run_custom_op(f"fdsd_{name}", *args)
    return out
