"""Builds the CUDA kernels for one GPU where they are missing, and makes wheels of them. Standard library only.

Usage: python custom_ops/cuda_package.py --wheel FOLDER [--architectures NAME ...]
       python custom_ops/cuda_package.py --keep FOLDER --capability 8.6 [--find]

--wheel writes a wheel of built kernels, which `--device gpu` takes where it is installed. --keep prints the path of the
library for a GPU of that compute capability in a folder, and is what a server runs on a machine without such a wheel:
the library is built first where it is missing, unless --find is there; how far that is, standard error says. In an
installation this file and the sources lie in the package.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from custom_ops import build, cuda_build

# In place of a compute capability: the GPU of cuda/emulation/, for which a C++ compiler builds.
EMULATED_GPU = "emulated"
# Libraries for an architecture in a folder: of this version, and of others that are installed too.
KEPT = 3
_PR_SET_PDEATHSIG = 1


def architecture_of(capability: str) -> str:
    """Return what to compile for on a GPU of a compute capability, "8.6", or the emulated one.

    Raises:
        BuildError: there is nothing for it.
    """
    if capability == EMULATED_GPU:
        return EMULATED_GPU
    wanted = tuple(int(part) for part in capability.split("."))
    numbers = {divmod(int(name.rstrip("a")), 10): name for name in cuda_build.ARCHITECTURES}
    fits = [key for key in numbers if key[0] == wanted[0] and key <= wanted]
    fits = [key for key in fits if key == wanted or not numbers[key].endswith("a")]
    if not fits:
        names = ", ".join(f"sm_{name}" for name in cuda_build.ARCHITECTURES)
        raise build.BuildError(f"expected a GPU that runs code for one of {names}, got one of capability {capability}")
    return numbers[max(fits)]


def keep(folder: pathlib.Path, capability: str, say: build.Say, *, may_build: bool) -> pathlib.Path | None:
    """Return the library for a GPU in a folder, named after its sources, compiler and architecture.

    It is built where it is missing and may be: once, even for several processes, and it appears whole or not at all.

    Raises:
        BuildError: nothing runs on the GPU, no compiler, or a compile error; OSError: the folder cannot be written.
    """
    architecture, sources = architecture_of(capability), cuda_build.compiled_sources()
    if architecture == EMULATED_GPU:
        sources += cuda_build.emulation_sources()
    digest = hashlib.sha256(build.sources_text(sources).encode()).hexdigest()[:16]
    begin = f"{digest}-sm_{architecture}-"
    try:
        library = folder / f"{begin}{_compiler_version(architecture)}-{cuda_build.LIBRARY}"
    except build.BuildError:  # there is no compiler any more: that of any one will do
        kept = sorted(folder.glob(f"{begin}*"))
        if may_build and not kept:
            raise
        return kept[-1] if kept else None
    if library.exists():
        with contextlib.suppress(OSError):  # of another user
            library.touch()
        return library
    if not may_build:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("kernels: another process builds some; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build_kept(library, architecture, say)
            _drop_old(folder, architecture)
    return library


def _build_kept(library: pathlib.Path, architecture: str, say: build.Say) -> None:
    """In a folder that an earlier build may have left unfinished."""
    say(f"kernels: compiling for sm_{architecture}, once and for minutes; they are kept in {library.parent}")
    objects = library.parent / "unfinished"
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir()
    try:
        if architecture == EMULATED_GPU:
            built = cuda_build.build_emulated(objects, say=say)
        else:
            built = cuda_build.build_cuda(objects, (architecture,), say)
        os.replace(built, library)
    finally:
        shutil.rmtree(objects, ignore_errors=True)


def _drop_old(folder: pathlib.Path, architecture: str) -> None:
    """Leave the libraries for an architecture that were used last; a process that has loaded another one keeps it."""
    found = sorted(folder.glob(f"*-sm_{architecture}-*{cuda_build.LIBRARY}"), key=lambda path: path.stat().st_mtime)
    for path in found[:-KEPT]:
        path.unlink()


def _compiler_version(architecture: str) -> str:
    """Of the compiler for it, as a part of a file's name."""
    command = [build.find_compiler()] if architecture == EMULATED_GPU else [cuda_build.find_nvcc()]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    if found is None:
        raise build.BuildError(
            f"{command[0]} --version: expected a version, got {(done.stdout + done.stderr)[-500:]!r}"
        )
    return found[0]


def write_wheel(library: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Write a library as a wheel of the package fastdeploy_sd_cuda, where a server finds it, and return its path."""
    version = build.package_version()
    info = f"fastdeploy_sd_cuda-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: fastdeploy-sd-cuda\nVersion: {version}\n"
    metadata += f"Summary: CUDA kernels of fastdeploy_sd\nRequires-Dist: fastdeploy-sd=={version}\n"
    tag = "py3-none-linux_x86_64"
    files = {
        "fastdeploy_sd_cuda/__init__.py": b'"""CUDA kernels of fastdeploy_sd."""\n',
        f"fastdeploy_sd_cuda/{cuda_build.LIBRARY}": library.read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: fastdeploy_sd\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    record = [f"{info}/RECORD,,"]
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*record, ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"fastdeploy_sd_cuda-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--wheel", type=pathlib.Path, metavar="FOLDER", help="write a wheel there")
    wanted.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="print the library's path there")
    names = cuda_build.ARCHITECTURES
    parser.add_argument("--architectures", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--capability", help=f"of the GPU, as 8.6, or {EMULATED_GPU}")
    parser.add_argument("--find", action="store_true", help="print nothing rather than build")
    args = parser.parse_args()
    try:
        if args.wheel is not None:
            print(write_wheel(cuda_build.build_cuda(architectures=args.architectures, say=_say), args.wheel))
            return 0
        # Ends with the server that waits for it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        library = keep(args.keep, args.capability, _say, may_build=not args.find)
    except (build.BuildError, OSError) as error:
        _say(f"custom_ops: {error}")
        return 1
    if library is not None:
        print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
