"""Build the CUDA kernels of custom_ops/cuda: emulated on the CPU for tests, and with nvcc. Standard library only.

Usage: python custom_ops/cuda_build.py [--nvcc]

Without --nvcc: build/cuda-emulated/libfdsd_cuda.so, where g++ compiles the kernels' own source against
cuda/emulation/. With it: build/cuda/libfdsd_cuda.so for all ARCHITECTURES, and a report of what every kernel takes of
a GPU. Neither is part of a wheel.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from custom_ops import build

CUDA = build.ROOT / "cuda"
BUILD = build.ROOT.parent / "build"
EMULATED = BUILD / "cuda-emulated"
LIBRARY = "libfdsd_cuda.so"
# Ampere (A100, then others with less shared memory), Ada, Hopper with its own instructions, Blackwell likewise.
ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
# What the CPU's kernels and these have in common.
_SHARED_SOURCES = (
    build.ROOT / "cpu" / "kernels" / "shared" / "kv_check.cc",
    build.ROOT / "cpu" / "kernels" / "shared" / "linear.cc",
    build.ROOT / "cpu" / "kernels" / "shared" / "moe_check.cc",
    build.ROOT / "cpu" / "runtime" / "call_list.cc",
    build.ROOT / "bindings" / "c_api_layout.cc",
)
_SHARED_HEADERS = (
    build.ROOT / "cpu" / "kernels" / "attention_sharing.h",
    build.ROOT / "cpu" / "kernels" / "gated_delta_check.h",
    build.ROOT / "cpu" / "kernels" / "kv_check.h",
    build.ROOT / "cpu" / "kernels" / "moe_check.h",
    build.ROOT / "cpu" / "kernels" / "rope_heads.h",
    build.ROOT / "cpu" / "kernels" / "linear_grouped.h",
    build.ROOT / "cpu" / "kernels" / "linear_layout.h",
    build.ROOT / "cpu" / "runtime" / "call_list.h",
    build.ROOT / "cpu" / "runtime" / "group_flags.h",
    build.ROOT / "bindings" / "c_api.h",
)
# Compiled for the host: the shared sources, and what says of which sources all is.
_HOST_SOURCES = (*_SHARED_SOURCES, CUDA / "runtime" / "c_api_sources.cc")
_INCLUDES = (build.ROOT / "include", build.ROOT / "cpu" / "kernels", build.ROOT / "cpu" / "runtime", CUDA)
_EMULATED_FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
_EMULATED_FLAGS += ["-Werror", "-Wno-unknown-pragmas", "-DFDSD_EMULATED"]
# -fmad=false: a * b + c is fused only where a kernel says so, as on the CPU.
_NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


@dataclass(frozen=True)
class KernelUse:
    """What one kernel takes of a GPU of one architecture.

    Attributes:
        architecture: `sm_90a`.
        registers: per thread.
        spilled_bytes: that a thread stores to memory for want of registers.
        shared_bytes: per block, without what a launch adds.
    """

    architecture: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def op_names() -> dict[str, bool]:
    """Return the ops that cuda/ops.h declares, in CamelCase, and whether each wants a workspace."""
    pattern = r"^Error (\w+)\(const \1Params& p, (void\* workspace, )?Stream stream\);"
    return {op: workspace != "" for op, workspace in re.findall(pattern, (CUDA / "ops.h").read_text(), re.MULTILINE)}


def _sources() -> list[pathlib.Path]:
    """Kernels, and what runs them."""
    return sorted([*CUDA.glob("*.cu"), *(CUDA / "runtime").glob("*.cu")])


def compiled_sources() -> list[pathlib.Path]:
    """Return every file under custom_ops that the library is compiled from, but for the emulation's own."""
    own = [path for path in CUDA.rglob("*") if path.suffix in (".cc", ".cu", ".h")]
    own = [path for path in own if CUDA / "emulation" not in path.parents]
    return sorted([*own, *(build.ROOT / "include").rglob("*.h"), *_SHARED_SOURCES, *_SHARED_HEADERS])


def _write_generated(folder: pathlib.Path) -> None:
    lines = []
    for op, has_workspace in op_names().items():
        snake_name = re.sub(r"(?<!^)([A-Z])", r"_\1", op).lower()
        lines.append(f"FDSD_CUDA_{'WORKSPACE_' if has_workspace else ''}OP({op}, {snake_name})\n")
    declarations = build.declarations_source(sorted((build.ROOT / "include" / "fdsd").glob("*.h")))
    sources = build.sources_text(compiled_sources())
    generated = {"cuda_ops.inc": "".join(lines), "declarations.inc": declarations, "cuda_sources.inc": sources}
    build.write_generated(folder, generated)


def emulated_units(folder: pathlib.Path, sources: Sequence[pathlib.Path] = ()) -> list[build.Unit]:
    """Return the objects of an emulated library: the emulation and these kernel files, without any all there are."""
    kernels = [*sources] or _sources()
    units = [build.Unit(path, folder / f"{path.stem}.o", (*_EMULATED_FLAGS, "-x", "c++")) for path in kernels]
    shared = [*sorted((CUDA / "emulation").glob("*.cc")), *_HOST_SOURCES]
    return units + [build.Unit(path, folder / f"{path.stem}_host.o", tuple(_EMULATED_FLAGS)) for path in shared]


def build_emulated(folder: pathlib.Path = EMULATED, sources: Sequence[pathlib.Path] = ()) -> pathlib.Path:
    """Compile what is out of date and return the library that runs kernels on the CPU.

    Raises:
        BuildError: no compiler, or a compile error.
    """
    compiler = build.find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_generated(folder)
        includes = [f"-I{path}" for path in (*_INCLUDES, folder)]
        flags = repr((compiler, _EMULATED_FLAGS))
        units = emulated_units(folder, sources)
        return build.compile_and_link(compiler, units, includes, flags, [], folder / LIBRARY)


def find_nvcc() -> str:
    """Return nvcc: $NVCC, the one on PATH, or that of the package nvidia-cuda-nvcc in this environment.

    Raises:
        BuildError: there is none.
    """
    wheels = pathlib.Path(sysconfig.get_paths()["platlib"]) / "nvidia"
    candidates = [os.environ.get("NVCC"), shutil.which("nvcc"), *map(str, sorted(wheels.glob("cu*/bin/nvcc")))]
    for candidate in candidates:
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise build.BuildError("expected nvcc 13 in $NVCC, on PATH or from the package nvidia-cuda-nvcc, found none")


def include_flags() -> list[str]:
    """Return what tells a compiler of host code where nvcc's headers are.

    Raises:
        BuildError: no nvcc, or it does not say.
    """
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        done = subprocess.run([find_nvcc(), "--dryrun", "-c", empty.name], capture_output=True, text=True, check=False)
    found = re.findall(r"^#\$ (?:SYSTEM_)?INCLUDES=(.*)$", done.stderr, re.MULTILINE)
    if not found:
        raise build.BuildError(f"nvcc --dryrun: expected its INCLUDES, got {done.stderr[-2000:]!r}")
    return shlex.split(" ".join(found))


def build_cuda(folder: pathlib.Path = BUILD / "cuda", architectures: Sequence[str] = ARCHITECTURES) -> pathlib.Path:
    """Compile what is out of date with nvcc and return the library. The output of ptxas is kept next to each object.

    Raises:
        BuildError: no nvcc, or a compile error.
    """
    nvcc = find_nvcc()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_generated(folder)
        return _build_cuda(nvcc, folder, architectures)


def _build_cuda(nvcc: str, folder: pathlib.Path, architectures: Sequence[str]) -> pathlib.Path:
    targets = [flag for arch in architectures for flag in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    flags = (*_NVCC_FLAGS, *targets, *(f"-I{path}" for path in (*_INCLUDES, folder)))
    units = [build.Unit(path, folder / f"{path.stem}.o", flags) for path in _sources()]
    units += [build.Unit(path, folder / f"{path.stem}_host.o", flags) for path in _HOST_SOURCES]
    record, text = folder / "flags", repr((nvcc, flags))
    has_other_flags = record.exists() and record.read_text() != text
    stale = [unit for unit in units if has_other_flags or not build.is_current(unit)]

    def compile_unit(unit: build.Unit) -> None:
        depfile = str(unit.obj.with_suffix(".d"))
        command = [nvcc, *unit.flags, "-MD", "-MF", depfile, "-c", str(unit.source), "-o", str(unit.obj)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise build.BuildError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-6000:]}")
        unit.obj.with_suffix(".ptxas").write_text(done.stdout + done.stderr)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_unit, stale))
    record.write_text(text)
    linked = folder / LIBRARY
    if not linked.exists() or linked.stat().st_mtime < max(unit.obj.stat().st_mtime for unit in units):
        unfinished = linked.with_suffix(".new")
        build.run([nvcc, "-shared", *(str(unit.obj) for unit in units), "-o", str(unfinished)])
        os.replace(unfinished, linked)
    return linked


def report(folder: pathlib.Path = BUILD / "cuda") -> list[KernelUse]:
    """Return what every kernel takes on every architecture, as ptxas said when `build_cuda` compiled it."""
    found = [use for path in _sources() for use in _uses((folder / f"{path.stem}.ptxas").read_text())]
    names = "\n".join(use.kernel for use in found)
    done = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    plain = [re.sub(r"^void |fdsd::|cuda::|\(anonymous namespace\)::", "", name) for name in done.stdout.splitlines()]
    short = [re.sub(r"\([^()]*\)$", "", name) for name in plain]
    return [replace(use, kernel=name) for use, name in zip(found, short, strict=True)]


def _uses(text: str) -> Iterator[KernelUse]:
    pattern = r"Compiling entry function '(\w+)' for '(\w+)'.*?Used (\d+) registers([^\n]*)"
    for match in re.finditer(pattern, text, re.DOTALL):
        spilled = re.search(r"(\d+) bytes spill stores", match[0])
        shared = re.search(r"(\d+) bytes smem", match[4])
        spilled_bytes, shared_bytes = (0 if found is None else int(found[1]) for found in (spilled, shared))
        yield KernelUse(match[2], match[1], int(match[3]), spilled_bytes, shared_bytes)


def report_lines(uses: Sequence[KernelUse]) -> Iterator[str]:
    """Return the report as a table."""
    yield f"{'kernel':<72} {'GPU':<8} {'registers':>9} {'spilled':>8} {'shared':>7}"
    for use in sorted(uses, key=lambda use: (use.kernel, use.architecture)):
        yield (
            f"{use.kernel[:72]:<72} {use.architecture:<8} {use.registers:>9} "
            f"{use.spilled_bytes:>8} {use.shared_bytes:>7}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", action="store_true", help="compile for GPUs and print what the kernels take")
    args = parser.parse_args()
    try:
        print(build_cuda() if args.nvcc else build_emulated())
    except build.BuildError as error:
        print(f"custom_ops: {error}", file=sys.stderr)
        return 1
    if args.nvcc:
        print("\n".join(report_lines(report())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
