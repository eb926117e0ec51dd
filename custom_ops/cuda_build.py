"""Build the CUDA kernels of custom_ops/cuda: emulated on the CPU for tests, and with nvcc. Standard library only.

Usage: python custom_ops/cuda_build.py [--nvcc] [--architectures NAME ...]

Without --nvcc: build/cuda-emulated/libfdsd_cuda.so, where g++ compiles the kernels' own source against
cuda/emulation/. With it: build/cuda/libfdsd_cuda.so, and a report of what every kernel takes of a GPU.
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
import tempfile
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from custom_ops import build

CUDA = build.ROOT / "cuda"
BUILD = build.ROOT.parent / "build"
EMULATED = BUILD / "cuda-emulated"
LIBRARY = "libfdsd_cuda.so"
# Ampere (A100, then others with less shared memory), Ada, Hopper with its own instructions, Blackwell likewise. Code
# runs on chips of the same first number and no lower second one, with an "a" on that chip alone.
ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
# What the CPU's kernels and these have in common.
_SHARED_SOURCES = (
    build.ROOT / "cpu" / "kernels" / "shared" / "kv_check.cc",
    build.ROOT / "cpu" / "kernels" / "shared" / "linear.cc",
    build.ROOT / "cpu" / "kernels" / "shared" / "moe_check.cc",
    build.ROOT / "cpu" / "runtime" / "call_list.cc",
    build.ROOT / "cpu" / "runtime" / "expert_segment.cc",
    build.ROOT / "bindings" / "c_api_layout.cc",
)
_SHARED_HEADERS = (
    build.ROOT / "cpu" / "kernels" / "attention_sharing.h",
    build.ROOT / "cpu" / "kernels" / "gated_delta_check.h",
    build.ROOT / "cpu" / "kernels" / "kv_check.h",
    build.ROOT / "cpu" / "kernels" / "lora_check.h",
    build.ROOT / "cpu" / "kernels" / "moe_check.h",
    build.ROOT / "cpu" / "kernels" / "rope_heads.h",
    build.ROOT / "cpu" / "kernels" / "linear_grouped.h",
    build.ROOT / "cpu" / "kernels" / "linear_layout.h",
    build.ROOT / "cpu" / "runtime" / "call_list.h",
    build.ROOT / "cpu" / "runtime" / "expert_runner.h",
    build.ROOT / "cpu" / "runtime" / "expert_segment.h",
    build.ROOT / "cpu" / "runtime" / "group_flags.h",
    build.ROOT / "cpu" / "runtime" / "shared_wait.h",
    build.ROOT / "bindings" / "c_api.h",
)
# Compiled for the host: the shared sources, and what says of which sources all is.
_HOST_SOURCES = (*_SHARED_SOURCES, CUDA / "runtime" / "c_api_sources.cc")
_INCLUDES = (build.ROOT / "include", build.ROOT / "cpu" / "kernels", build.ROOT / "cpu" / "runtime", CUDA)
_EMULATED_FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
_EMULATED_FLAGS += ["-Werror", "-Wno-unknown-pragmas", "-DFDSD_EMULATED"]
# -fmad=false: a * b + c is fused only where a kernel says so, as on the CPU.
_NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


def op_names() -> dict[str, bool]:
    """Return the ops that cuda/ops.h declares, in CamelCase, and whether each wants a workspace."""
    pattern = r"^Error (\w+)\(const \1Params& p, (void\* workspace, )?Stream stream\);"
    return {op: workspace != "" for op, workspace in re.findall(pattern, (CUDA / "ops.h").read_text(), re.MULTILINE)}


def kernel_sources() -> list[pathlib.Path]:
    """Kernels, and what runs them."""
    return sorted([*CUDA.glob("*.cu"), *(CUDA / "runtime").glob("*.cu")])


def compiled_sources() -> list[pathlib.Path]:
    """Return every file under custom_ops that the library is compiled from, but for the emulation's own."""
    own = [path for path in CUDA.rglob("*") if path.suffix in (".cc", ".cu", ".h")]
    own = [path for path in own if CUDA / "emulation" not in path.parents]
    return sorted([*own, *(build.ROOT / "include").rglob("*.h"), *_SHARED_SOURCES, *_SHARED_HEADERS])


def emulation_sources() -> list[pathlib.Path]:
    """Return what the emulated library is compiled from besides."""
    return sorted(path for path in (CUDA / "emulation").iterdir() if path.suffix in (".cc", ".h"))


def shipped_files() -> list[pathlib.Path]:
    """Return what an installation builds a library from, and with."""
    files = [build.ROOT / f"{name}.py" for name in ("build", "cuda_build", "cuda_package")]
    return [*files, *compiled_sources(), *emulation_sources()]


def _write_generated(folder: pathlib.Path, architectures: Sequence[str]) -> None:
    lines = []
    for op, has_workspace in op_names().items():
        snake_name = re.sub(r"(?<!^)([A-Z])", r"_\1", op).lower()
        lines.append(f"FDSD_CUDA_{'WORKSPACE_' if has_workspace else ''}OP({op}, {snake_name})\n")
    declarations = build.declarations_source(sorted((build.ROOT / "include" / "fdsd").glob("*.h")))
    sources = build.sources_text(compiled_sources())
    generated = {"cuda_ops.inc": "".join(lines), "declarations.inc": declarations, "cuda_sources.inc": sources}
    generated["cuda_architectures.inc"] = '"' + ", ".join(f"sm_{name}" for name in architectures) + '"\n'
    build.write_generated(folder, generated)


def emulated_units(folder: pathlib.Path, sources: Sequence[pathlib.Path] = ()) -> list[build.Unit]:
    """Return the objects of an emulated library: the emulation and these kernel files, without any all there are."""
    kernels = [*sources] or kernel_sources()
    units = [build.Unit(path, folder / f"{path.stem}.o", (*_EMULATED_FLAGS, "-x", "c++")) for path in kernels]
    shared = [*(path for path in emulation_sources() if path.suffix == ".cc"), *_HOST_SOURCES]
    return units + [build.Unit(path, folder / f"{path.stem}_host.o", tuple(_EMULATED_FLAGS)) for path in shared]


def build_emulated(
    folder: pathlib.Path = EMULATED, sources: Sequence[pathlib.Path] = (), say: build.Say = str
) -> pathlib.Path:
    """Compile what is out of date and return the library that runs kernels on the CPU.

    Raises:
        BuildError: no compiler, or a compile error.
    """
    compiler = build.find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_generated(folder, ARCHITECTURES)
        includes = [f"-I{path}" for path in (*_INCLUDES, folder)]
        return build.compile_and_link(compiler, emulated_units(folder, sources), includes, [], folder / LIBRARY, say)


def find_tool(name: str) -> str:
    """Return a program of CUDA: of NVIDIA's packages in this environment, or the one on PATH.

    Raises:
        BuildError: there is none.
    """
    packages = [str(path) for place in sys.path for path in sorted(pathlib.Path(place).glob(f"nvidia/cu*/bin/{name}"))]
    for candidate in (*packages, shutil.which(name)):
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise build.BuildError(f"expected {name} of a CUDA toolkit on PATH or of NVIDIA's packages, found none")


def find_nvcc() -> str:
    """Return nvcc: $NVCC, or as find_tool. Raises BuildError: there is none."""
    named = os.environ.get("NVCC")
    if named and not os.access(named, os.X_OK):
        raise build.BuildError(f"NVCC: expected a compiler, got {named}")
    return named or find_tool("nvcc")


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


def build_cuda(
    folder: pathlib.Path = BUILD / "cuda",
    architectures: Sequence[str] = ARCHITECTURES,
    say: build.Say = str,
    more: Sequence[tuple[str, str]] = (),
) -> pathlib.Path:
    """Compile what is out of date with nvcc and return the library. The output of ptxas is kept next to each object.

    Args:
        more: further architectures of single files, by the file's name.

    Raises:
        BuildError: no nvcc, or a compile error.
    """
    nvcc = find_nvcc()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_generated(folder, architectures)
        return _build_cuda(nvcc, folder, _cuda_units(folder, architectures, more), say)


def _cuda_units(
    folder: pathlib.Path, architectures: Sequence[str], more: Sequence[tuple[str, str]]
) -> list[build.Unit]:
    def unit(path: pathlib.Path, end: str) -> build.Unit:
        names = [*architectures, *(arch for name, arch in more if name == path.name)]
        targets = [flag for arch in names for flag in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
        includes = [f"-I{include}" for include in (*_INCLUDES, folder)]
        return build.Unit(path, folder / f"{path.stem}{end}", (*_NVCC_FLAGS, *targets, *includes))

    return [*(unit(path, ".o") for path in kernel_sources()), *(unit(path, "_host.o") for path in _HOST_SOURCES)]


def _build_cuda(nvcc: str, folder: pathlib.Path, units: Sequence[build.Unit], say: build.Say) -> pathlib.Path:
    record, text = folder / "flags", repr((nvcc, [unit.flags for unit in units]))
    has_other_flags = record.exists() and record.read_text() != text
    stale = [unit for unit in units if has_other_flags or not build.is_current(unit)]

    def compile_unit(unit: build.Unit) -> None:
        depfile = str(unit.obj.with_suffix(".d"))
        command = [nvcc, *unit.flags, "-MD", "-MF", depfile, "-c", str(unit.source), "-o", str(unit.obj)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise build.BuildError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-6000:]}")
        unit.obj.with_suffix(".ptxas").write_text(done.stdout + done.stderr)

    build.compile_all(stale, compile_unit, say)
    record.write_text(text)
    linked = folder / LIBRARY
    if not linked.exists() or linked.stat().st_mtime < max(unit.obj.stat().st_mtime for unit in units):
        unfinished = linked.with_suffix(".new")
        build.run([nvcc, "-shared", *(str(unit.obj) for unit in units), "-o", str(unfinished)])
        os.replace(unfinished, linked)
    return linked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", action="store_true", help="compile for GPUs and print what the kernels take")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, metavar="NAME")
    args = parser.parse_args()
    try:
        print(build_cuda(architectures=args.architectures) if args.nvcc else build_emulated())
    except build.BuildError as error:
        print(f"custom_ops: {error}", file=sys.stderr)
        return 1
    if args.nvcc:
        from custom_ops import cuda_report  # noqa: PLC0415 (which knows this file)

        print("\n".join(cuda_report.report_lines(cuda_report.report())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
