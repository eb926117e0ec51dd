"""`fastdeploy-sd explain-config` and `collect-env`. Loads neither a model nor Paddle."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata

from fastdeploy_sd import __version__
from fastdeploy_sd.cli.arguments import Parser
from fastdeploy_sd.config import Config, explain, load_configs
from fastdeploy_sd.device.cuda.library import usable_library
from fastdeploy_sd.device.library import LIBRARY_PATH, amx_refusal, isa, load, num_threads
from fastdeploy_sd.device.processors import first_processor, own_processors
from fastdeploy_sd.errors import ConfigError, DeviceLost
from fastdeploy_sd.hub import located
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.roofline import measure_roofline
from fastdeploy_sd.worker.loading.engine_rows import speed_rows
from fastdeploy_sd.worker.loading.forecast import forecast, weights_in_memory
from fastdeploy_sd.worker.loading.free_memory import free_memory

PACKAGES = (
    "paddlepaddle",
    "paddlepaddle-gpu",
    "numpy",
    "tokenizers",
    "pyzmq",
    "msgpack",
    "fastapi",
    "uvicorn",
    "pydantic",
)
# What the kernels of each level need, by the names of /proc/cpuinfo.
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
_AMX = {"amx_tile", "amx_int8", "amx_bf16"}
_LEVELS = {"amx": _AVX512 | _AMX, "avx512": _AVX512, "avx2": {"avx2", "fma", "f16c"}}
_FORMATS: tuple[LinearFormat, ...] = ("bfloat16", "wint8", "wint4")
# What machine_speed reads: larger than any cache two threads share.
STREAM_BYTES = 512 << 20
NUM_PASSES = 4


def explain_config(argv: Sequence[str]) -> int:
    """Print every option's effective value and origin, for the arguments `serve` would get; secrets are hidden.

    They are followed by what the options lead to with this checkpoint on this machine. Of several models, what they
    share comes first. Raises ConfigError: as load_configs and forecast.
    """
    description = "Print every option's effective value, where it came from, and what they come to; loads nothing."
    found = load_configs(argv, "fastdeploy-sd explain-config", description)
    configs = [located(config, may_fetch=False) for config in found]
    rows = [{(row.name, json.dumps(row.value), row.origin): None for row in explain(config)} for config in configs]
    widths = [max(len(row[column]) for of_model in rows for row in of_model) for column in (0, 1)]
    of_all = {row for row in rows[0] if all(row in of_model for of_model in rows)}
    _print_rows([row for row in rows[0] if row in of_all], widths)
    weights = [0] if len(configs) == 1 else [weights_in_memory(config) for config in configs]
    for number, config in enumerate(configs):
        print()
        if len(configs) > 1:
            print(f"model {config.model.served_name}")
            _print_rows([row for row in rows[number] if row not in of_all], widths)
        free = free_memory() - sum(weights) + weights[number]
        for name, text in (forecast(config, lambda: free) | _engine_speed(config)).items():  # noqa: B023
            print(f"{name:<{widths[0]}}  {text}")
    return 0


def _print_rows(rows: Sequence[tuple[str, str, str]], widths: Sequence[int]) -> None:
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def _engine_speed(config: Config) -> dict[str, str]:
    try:
        return speed_rows(config)
    except ConfigError as error:
        return {"several engines": f"not measured: {error.message}"}


def collect_env(argv: Sequence[str]) -> int:
    """Print versions and hardware, and how fast that is at this moment."""
    text = "Print versions, hardware and its speed, for bug reports; takes half a second and 512 MiB of memory."
    Parser("fastdeploy-sd collect-env", text).parse_args(argv)
    for name, value in (environment() | machine_speed()).items():
        print(f"{name + ':':<18}{value}")
    return 0


def environment() -> dict[str, str]:
    """Return what a bug report should say about this machine; unknown things read "unknown" or "not installed"."""
    cpu = first_processor()
    flags = set(cpu.get("flags", "").split())
    refusal = _amx_refusal(flags)
    facts = {
        "fastdeploy_sd": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": cpu.get("model name", platform.machine()),
        "processors": f"{os.cpu_count()}, {own_processors().describe()}",
        "threads": f"{own_processors().num_threads} unless --num-threads says how many",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "isa": isa_level(flags if refusal is None else flags - _AMX),
        "amx": "usable" if refusal is None else f"not used: {refusal}",
        "isa override": os.environ.get("FDSD_ISA", "none"),
        "kernel library": _kernel_library(),
        "compiler": _compiler(),
    }
    facts |= _gpu()
    return facts | {name: _version(name) for name in PACKAGES}


def machine_speed() -> dict[str, str]:
    """Return what memory and arithmetic allow with the threads a server would have, and what that means for steps."""
    try:
        measured = measure_roofline(_FORMATS, STREAM_BYTES, NUM_PASSES)
        how = f"{num_threads()} threads, level {isa()}"
    except ConfigError as error:
        return dict.fromkeys(("measured with", "memory read", "peak", "limits"), f"not measured: {error.message}")
    rows = {fmt: measured.free_rows(fmt) for fmt in _FORMATS}
    up_to = ", ".join(f"{count} rows of {fmt}" for fmt, count in rows.items() if count is not None)
    peaks = ", ".join(f"{peak / 1e9:.0f} {fmt}" for fmt, peak in measured.peaks.items() if peak)
    return {
        "measured with": how,
        "memory read": f"{measured.read_bytes_per_s / 1e9:.1f} GB/s" if measured.read_bytes_per_s else "unknown",
        "peak": f"{peaks} GOP/s" if peaks else "unknown: this level has no instruction for dot products",
        "limits": f"memory for steps of up to {up_to}; arithmetic for larger ones and prompts" if up_to else "unknown",
    }


def isa_level(flags: set[str]) -> str:
    """Return the best instruction-set level the kernels can use on a processor with these flags."""
    return next((level for level, needed in _LEVELS.items() if needed <= flags), "scalar")


def _amx_refusal(flags: set[str]) -> str | None:
    """Return why level amx is not used, None where it is; the system is asked only where the processor has AMX."""
    if isa_level(flags) != "amx":
        return "not in this processor"
    try:
        return amx_refusal()
    except ConfigError as error:
        return f"nothing can ask the system for it: {error.message}"


def _kernel_library() -> str:
    """The library's file, or why it cannot be taken."""
    try:
        load(LIBRARY_PATH)
    except ConfigError as error:
        return f"not used: {error.message}"
    return str(LIBRARY_PATH)


def _gpu() -> dict[str, str]:
    """The GPU that `--device gpu` takes and its kernels, or why there is none."""
    found = usable_library()
    if isinstance(found, str):
        return {"gpu": f"not used: {found}"}
    kernels = f"{found.path}, for {found.architectures}"
    import fastdeploy_sd.worker.loading.framework  # noqa: F401 (before Paddle's import)
    from fastdeploy_sd.device.cuda.paddle_memory import memory_text

    try:
        return {"gpu": found.text, "gpu kernels": kernels, "gpu memory": memory_text(found)}
    except (ValueError, DeviceLost) as error:  # others fill it: there is no room for a context
        return {"gpu": f"not used: {found.device_name}: {error}", "gpu kernels": kernels}


def _compiler() -> str:
    path = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if path is None:
        return "not found"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return done.stdout.partition("\n")[0] or f"{path}: unknown version"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
