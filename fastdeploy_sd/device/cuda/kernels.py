"""Finds the library of CUDA kernels for this machine's GPU, and has it built where there is none for it.

It is sought in the package fastdeploy_sd_cuda, where a checkout builds it, and in the user's cache folder. There it is
built by custom_ops/cuda_package.py, whose sources and the kernels' lie in an installation too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import pathlib
import subprocess
import sys
import time

from fastdeploy_sd.device.library import LIBRARY_PATH
from fastdeploy_sd.device.program.operator_files import source_root
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.folders import cache_folder

_log = logging.getLogger(__name__)

NAME = "libfdsd_cuda.so"
_PACKAGE = "fastdeploy_sd_cuda"
# What the driver calls the two numbers of a compute capability.
_MAJOR, _MINOR = 75, 76
# How cuda_package.py begins to say why it failed.
_FAILED = "custom_ops: "
_HINT = "`pip install 'fastdeploy_sd[gpu]'` brings nvcc; the C++ compiler is g++ of the distribution"


def capability(number: int) -> str:
    """Return the compute capability of the GPU of a number, "8.6"; $FDSD_CUDA_CAPABILITY says another.

    Raises ConfigError: there is no driver, or no such GPU.
    """
    chosen = os.environ.get("FDSD_CUDA_CAPABILITY")
    if chosen:
        return chosen
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError("no NVIDIA driver: libcuda.so.1 not found") from None
    gpu, parts = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(gpu), number) != 0:
        raise ConfigError(f"the NVIDIA driver knows no GPU {number}")
    for part, attribute in zip(parts, (_MAJOR, _MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, gpu)
    return ".".join(str(part.value) for part in parts)


def installed() -> list[pathlib.Path]:
    """Return the libraries that were built by hand, the preferred one first."""
    package = importlib.util.find_spec(_PACKAGE)
    folders = [] if package is None or package.origin is None else [pathlib.Path(package.origin).parent]
    folders.append(LIBRARY_PATH.parents[2] / "build" / "cuda")
    return [folder / NAME for folder in folders if (folder / NAME).exists()]


def kept(gpu: str, *, may_build: bool) -> pathlib.Path | None:
    """Return the library in the user's cache folder for a GPU of this capability, None if there is none.

    It is built first where it is missing and may be, which the log follows.

    Raises ConfigError: there is nothing to build from or with, or that failed; the text has what a compiler said.
    """
    begin, folder = time.perf_counter(), cache_folder() / "cuda"
    command = [sys.executable, "-B", str(source_root() / "cuda_package.py")]
    command += ["--keep", str(folder), "--capability", gpu, *([] if may_build else ["--find"])]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            if said or line.startswith(_FAILED):
                said.append(line.removeprefix(_FAILED))
            else:
                _log.info("%s", line.rstrip())
        path = process.stdout.read().strip()
    if process.returncode != 0:
        raise ConfigError(f"CUDA kernels for a GPU of {gpu} cannot be built: {''.join(said).strip()}\n{_HINT}")
    if path and may_build:
        _log.info("CUDA kernels for a GPU of %s: %s, found in %.1f s", gpu, path, time.perf_counter() - begin)
    return pathlib.Path(path) if path else None
