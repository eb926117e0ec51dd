"""The file with the Paddle operators: where it is looked for, and how it is compiled. Imports no Paddle.

A source text (see operator_source.py) becomes one shared object that registers `fdsd_*` operators with Paddle. Its
name holds a digest of the text, headers, flags and Paddle's version, so one that is there fits. A wheel may bring it;
else it is compiled once, under a file lock, into a folder of the user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fastdeploy_sd.device.library import LIBRARY_PATH
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.folders import cache_folder

_log = logging.getLogger(__name__)

# -w: Paddle's own headers warn; ours are compiled with -Werror in the kernel library.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w")
# Where a file next to the kernel library finds it.
BESIDE = "$ORIGIN"


@dataclass(frozen=True, slots=True)
class PaddleInstall:
    """The Paddle that operators are compiled against; its folder has headers and libraries."""

    root: pathlib.Path
    version: str
    commit: str


def source_root() -> pathlib.Path:
    """Return the folder that holds bindings/, include/ and cuda/: the checkout's custom_ops, or its part in the wheel.

    Raises ConfigError: there is none.
    """
    package = pathlib.Path(__file__).resolve().parents[2]
    for root in (package.parent / "custom_ops", package / "csrc" / "custom_ops"):
        if (root / "bindings" / "paddle_binding.h").exists():
            return root
    raise ConfigError(f"expected the sources of operators in {package}, got none; reinstall fastdeploy_sd")


def headers(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted((root / "include" / "fdsd").glob("*.h"))


def shipped_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Return every file that the operators' source includes, but for Paddle's headers."""
    return [root / "bindings" / "paddle_binding.h", *headers(root)]


def file_name(root: pathlib.Path, paddle: PaddleInstall, source: str, library_folder: str) -> str:
    """Return the name of the operators' file, which says what it was made of."""
    digest = hashlib.sha256()
    for text in (paddle.version, paddle.commit, source, library_folder, *FLAGS):
        digest.update(text.encode() + b"\0")
    for path in shipped_files(root):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"operators-{digest.hexdigest()[:24]}.so"


def find_or_compile(paddle: PaddleInstall, source: str) -> pathlib.Path:
    """Return the file that fits the installed Paddle; compiles it, which is logged, when there is none.

    Raises ConfigError: there is none, and no compiler, no folder to write to, or the compiler fails.
    """
    root = source_root()
    shipped = LIBRARY_PATH.parent / file_name(root, paddle, source, BESIDE)
    if shipped.exists():
        return shipped
    library_folder = str(LIBRARY_PATH.parent)
    kept = cache_folder() / file_name(root, paddle, source, library_folder)
    if not kept.exists():
        compiler = find_compiler()
        with _locked(kept.parent):
            if not kept.exists():
                _compile_logged(compiler, paddle, source, kept)
    return kept


def find_compiler() -> str:
    """Return the C++ compiler: what CXX names, else g++ or c++. Raises ConfigError: there is none."""
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")
    if found is None:
        got = f"CXX={named}, which is none" if named else "none"
        raise ConfigError(f"Paddle operators: expected a C++ compiler (g++) on PATH to build them with, got {got}")
    return found


def include_flags(root: pathlib.Path, paddle: PaddleInstall) -> list[str]:
    """Return what tells a compiler where the operators' headers are; `root` as `source_root`."""
    headers_of_paddle = paddle.root / "include"
    folders = [root / "include", root / "bindings", headers_of_paddle, headers_of_paddle / "third_party"]
    return [f"-I{folder}" for folder in folders]


def compile_operators(
    compiler: str, paddle: PaddleInstall, text: str, library: pathlib.Path, out: pathlib.Path, *, library_folder: str
) -> None:
    """Compile a source text into `out`, which appears at once or not at all, linked with a library.

    The loader looks for that in library_folder, a path or BESIDE.

    Raises ConfigError: the compiler fails; the log has its output; OSError: `out` cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        source = pathlib.Path(folder, "operators.cc")
        source.write_text(text)
        obj = f"{folder}/operators.o"
        _run([compiler, *FLAGS, *include_flags(source_root(), paddle), "-c", str(source), "-o", obj])
        # Paddle loads its libraries with local visibility, so the operators must name them to find their symbols.
        libraries = [
            path
            for name in ("libphi_core.so", "libphi.so", "libcommon.so", "libpaddle.so")
            for path in (paddle.root / "libs" / name, paddle.root / "base" / name)
            if path.exists()
        ]
        links = [flag for path in (*libraries, library) for flag in (f"-L{path.parent}", f"-l:{path.name}")]
        folders = dict.fromkeys([library_folder, *(str(path.parent) for path in libraries)])
        built = f"{folder}/operators.so"
        link = [compiler, "-shared", obj, *links, *(f"-Wl,-rpath,{path}" for path in folders), "-o", built]
        _run(link)
        os.replace(built, out)


def _compile_logged(compiler: str, paddle: PaddleInstall, source: str, out: pathlib.Path) -> None:
    _log.info(
        "compiling the Paddle operators for Paddle %s, once and for some ten seconds; kept in %s",
        paddle.version, out.parent,
    )  # fmt: skip
    begin = time.perf_counter()
    try:
        compile_operators(compiler, paddle, source, LIBRARY_PATH, out, library_folder=str(LIBRARY_PATH.parent))
    except OSError as error:
        raise _folder_error(out.parent, error) from None
    _log.info("compiled the Paddle operators in %.1f s: %s", time.perf_counter() - begin, out)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the folder's lock, so that processes that start together compile once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise _folder_error(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that compiles the Paddle operators in %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _folder_error(folder: pathlib.Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"FDSD_CACHE_DIR: expected a folder to write the Paddle operators to, got {folder}: {error.strerror or error}"
    )


def _run(command: list[str]) -> None:
    """Run a compiler; raises ConfigError when it fails, and the log has its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        _log.error("`%s` failed:\n%s", " ".join(done.args), done.stderr[-4000:])
        raise ConfigError(
            f"Paddle operators: expected {done.args[0]} to compile them, got exit status {done.returncode}"
        )
