"""Build the kernel library libfdsd.so. Standard library only; used by setup.py and by hand.

Usage: python custom_ops/build.py [--sanitize] [--out DIR]

Files in cpu/kernels/ are compiled once per instruction-set level, those in cpu/kernels/amx/ for avx512 alone, once with
the chip's tiles and once with their twin in plain C++; the rest (cpu/kernels/shared/, cpu/drafters/,
cpu/runtime/, the C functions of bindings/) once with baseline flags; objects are kept in build/ and rebuilt when a
source or header they include is newer. Two files are generated: the ops and the fields of the structs that the
headers in include/fdsd/ declare, and what the library's C functions and structs are declared in.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"]
BASELINE_FOLDERS = ("cpu/kernels/shared", "cpu/drafters", "cpu/runtime")
ISA_FLAGS = {"scalar": [], "avx2": AVX2_FLAGS, "avx512": [*AVX2_FLAGS, *AVX512_FLAGS]}
TILES = ("amx", "amx_twin")
Say = Callable[[str], object]
# -ffp-contract=off: a * b + c is fused only where a kernel says so, or rows would depend on how the compiler unrolled.
# -Wno-*uninitialized: gcc 12 reports its own AVX-512 headers.
COMMON_FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread"]
COMMON_FLAGS += ["-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# For us only: another compiler may warn about something new, and that must not stop an installation.
STRICT_FLAGS = ["-Werror"]
# A line of a header outside of structs.
_DECLARATION = r"#.*|[^{}]*[;,]|enum class [^{]*{[^}]*};|"
SANITIZE_FLAGS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class BuildError(Exception):
    """The library cannot be built here; the text says why."""


@dataclass(frozen=True)
class Unit:
    """One object file to compile."""

    source: pathlib.Path
    obj: pathlib.Path
    flags: tuple[str, ...]


def find_compiler() -> str:
    """Return the C++ compiler.

    Raises:
        BuildError: not an x86-64 machine, or no compiler.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"expected an x86-64 machine, got {platform.machine()}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("expected a C++20 compiler (g++ 12 or newer) on PATH, found none")
    return compiler


def units(build: pathlib.Path, extra: list[str]) -> list[Unit]:
    """Return every object the library is made of."""
    found = []
    for source in sorted((ROOT / "cpu" / "kernels").glob("*.cc")):
        for isa, flags in ISA_FLAGS.items():
            all_flags = (*COMMON_FLAGS, *extra, *flags, f"-DFDSD_ISA={isa}")
            found.append(Unit(source, build / f"{source.stem}.{isa}.o", all_flags))
    for source in sorted((ROOT / "cpu" / "kernels" / "amx").glob("*.cc")):
        for tiles in TILES:
            all_flags = (*COMMON_FLAGS, *extra, *ISA_FLAGS["avx512"], "-DFDSD_ISA=avx512", f"-DFDSD_TILES={tiles}")
            found.append(Unit(source, build / f"{source.stem}.{tiles}.o", all_flags))
    baseline = [source for folder in BASELINE_FOLDERS for source in sorted((ROOT / folder).glob("*.cc"))]
    baseline += sorted((ROOT / "bindings").glob("c_api*.cc"))
    return found + [Unit(source, build / f"{source.stem}.o", (*COMMON_FLAGS, *extra)) for source in baseline]


def struct_members(header: pathlib.Path) -> dict[str, list[tuple[str, str]]]:
    """Return the structs of a header: name -> (type, name) of each member. A nested struct is named `Outer::Inner`.

    Raises:
        BuildError: naming the first line that is not in the headers' style: one field, brace or declaration per line.
    """
    structs: dict[str, list[tuple[str, str]]] = {}
    inside: list[str] = []  # names of the blocks around a line, "" of those that are no structs
    for number, text in enumerate(header.read_text().splitlines(), 1):
        line = text.split("//")[0].strip()
        if match := re.fullmatch(r"struct (\w+) {", line):
            inside.append("::".join([*filter(None, inside[-1:]), match[1]]))
            structs[inside[-1]] = []
        elif re.fullmatch(r"(namespace|enum class|extern) [^;}]*{", line):
            inside.append("")
        elif (match := re.fullmatch(r"}(?: (\w+))?;?", line)) and inside:
            ended = inside.pop()
            if match[1] is not None and any(inside[-1:]):
                structs[inside[-1]].append((ended, match[1]))
        elif (match := re.fullmatch(r"((?:const )?[\w:]+\**) (\w+);", line)) and any(inside[-1:]):
            structs[inside[-1]].append((match[1], match[2]))
        elif (any(inside[-1:]) and line) or not re.fullmatch(_DECLARATION, line):
            raise BuildError(f"{header}:{number}: expected one declaration, field or brace, got {line!r}")
    return structs


def declarations_source(headers: list[pathlib.Path]) -> str:
    """Return what the headers declare, for files that need all of it: FDSD_OP(Name, name) of every op, a function
    `Error Name(const NameParams& p)`; FDSD_CALL(Name, Params, name) of every call of an object with state, a function
    `CallStatus Name(const Params& p)`; and the fields of every struct, members of members by their path.

    Raises:
        BuildError: a header is in another style.
    """
    structs: dict[str, list[tuple[str, str]]] = {}
    ops: list[str] = []
    calls: list[tuple[str, str]] = []
    for header in headers:
        structs |= struct_members(header)
        ops += re.findall(r"^Error (\w+)\(const \1Params& p\);", header.read_text(), re.MULTILINE)
        calls += re.findall(r"^CallStatus (\w+)\(const (\w+)& p\);", header.read_text(), re.MULTILINE)

    def snake_name(name: str) -> str:
        return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()

    def paths(name: str) -> list[str]:
        found = []
        for kind, member in structs[name]:
            found += [f"{member}.{path}" for path in paths(kind)] if kind in structs else [member]
        return found

    lines = [f'#include "fdsd/{header.name}"' for header in headers]
    lines += ["#ifdef FDSD_OP", *(f"FDSD_OP({op}, {snake_name(op)})" for op in ops), "#endif"]
    lines += ["#ifdef FDSD_CALL", *(f"FDSD_CALL({name}, {params}, {snake_name(name)})" for name, params in calls)]
    lines += ["#endif", "#ifdef FDSD_STRUCT"]
    for name in structs:
        lines += [f"FDSD_STRUCT({name})", *(f"FDSD_FIELD({path})" for path in paths(name)), "FDSD_END"]
    return "\n".join([*lines, "#endif", ""])


def interface_sources() -> list[pathlib.Path]:
    """Return what declares all that callers of the library rely on: the structs, the ops and the C functions."""
    return [*sorted((ROOT / "include" / "fdsd").glob("*.h")), *sorted((ROOT / "bindings").glob("c_api*"))]


def package_version() -> str:
    """Return the version of the package that these sources are of: next to them, or around them in an installation."""
    package = ROOT.parent / "fastdeploy_sd"
    text = (package if package.is_dir() else ROOT.parents[1]).joinpath("__init__.py").read_text()
    return str(re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0])


def sources_text(sources: list[pathlib.Path]) -> str:
    """Return the package's version and a digest of every source, a line each, as a C++ string."""
    digests = (
        f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sources
    )
    return "".join(f'"{line}\\n"\n' for line in (package_version(), *digests))


def write_generated(folder: pathlib.Path, texts: dict[str, str]) -> None:
    """Write files by name; one that is there with this text stays as it is, and so what depends on it."""
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def is_current(unit: Unit) -> bool:
    """Whether the object is newer than its source and every header it included; not while it is being compiled."""
    try:
        built = unit.obj.stat().st_mtime
        _, colon, inputs = unit.obj.with_suffix(".d").read_text(errors="replace").partition(":")
        paths = inputs.replace("\\\n", " ").split()
        return colon != "" and all(os.path.getmtime(path) <= built for path in paths)
    except FileNotFoundError:
        return False


def run(command: list[str]) -> None:
    """Run a compiler command.

    Raises:
        BuildError: it failed; the text holds its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-6000:]}")


def build_library(out: pathlib.Path, build: pathlib.Path, extra: list[str]) -> pathlib.Path:
    """Compile what is out of date in `build` and link `out`/libfdsd.so; builds that start together take turns.

    Args:
        out: folder of the library.
        build: folder of the objects; one per set of flags.
        extra: flags in addition to the common ones.

    Raises:
        BuildError: no compiler, or a compile error.
    """
    compiler = find_compiler()
    build.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(compiler, out, build, extra)


def _build(compiler: str, out: pathlib.Path, build: pathlib.Path, extra: list[str]) -> pathlib.Path:
    declarations = declarations_source(sorted((ROOT / "include" / "fdsd").glob("*.h")))
    write_generated(build, {"declarations.inc": declarations, "sources.inc": sources_text(interface_sources())})
    includes = [f"-I{ROOT / folder}" for folder in ("include", "cpu/kernels", "cpu/drafters", "cpu/runtime")]
    includes.append(f"-I{build}")
    linked = compile_and_link(compiler, units(build, extra), includes, extra, build / "libfdsd.so")
    library = out / "libfdsd.so"
    if not library.exists() or library.stat().st_mtime_ns != linked.stat().st_mtime_ns:
        # Copied next to the library, then renamed: a process that has mapped the old file keeps it.
        fresh = out / f".libfdsd.{os.getpid()}.so"
        shutil.copy2(linked, fresh)
        os.replace(fresh, library)
    return library


def compile_all(todo: Sequence[Unit], compile_unit: Callable[[Unit], None], say: Say) -> None:
    """Compile units in as many processes as there are processors, and say after each how many there are.

    Raises:
        BuildError: as compile_unit; what has not begun then is left out.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = [pool.submit(compile_unit, unit) for unit in todo]
        try:
            for number, finished in enumerate(as_completed(started), 1):
                finished.result()
                say(f"kernels: {number} of {len(todo)} files compiled")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def compile_and_link(
    compiler: str, todo: list[Unit], includes: list[str], links: list[str], linked: pathlib.Path, say: Say = str
) -> pathlib.Path:
    """Compile those units that are out of date, in as many processes as there are processors, and link all of them.

    Args:
        todo: their flags are kept next to the objects; other flags compile all anew.
        includes: flags of every unit in addition to its own; no object depends on them.
        links: flags of linking.
        linked: the shared object; in the folder of the objects.
        say: is told how far it is.

    Raises:
        BuildError: a compile error.
    """
    record, flags = linked.parent / "flags", repr((compiler, sorted({unit.flags for unit in todo}), links))
    has_other_flags = record.exists() and record.read_text() != flags
    stale = [unit for unit in todo if has_other_flags or not is_current(unit)]

    def compile_unit(unit: Unit) -> None:
        depfile = unit.obj.with_suffix(".d")
        output = ["-MMD", "-MF", str(depfile), "-c", str(unit.source), "-o", str(unit.obj)]
        run([compiler, *unit.flags, *includes, *output])

    compile_all(stale, compile_unit, say)
    record.write_text(flags)
    newest = max(unit.obj.stat().st_mtime for unit in todo)
    if not linked.exists() or linked.stat().st_mtime < newest:
        unfinished = linked.with_suffix(".new")
        options = ["-shared", "-Wl,--no-undefined", "-pthread", *links]
        run([compiler, *(str(unit.obj) for unit in todo), *options, "-o", str(unfinished)])
        os.replace(unfinished, linked)
    return linked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="build with AddressSanitizer and UBSan")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT.parent / "fastdeploy_sd" / "lib")
    args = parser.parse_args()
    folder = ROOT.parent / "build" / ("sanitize" if args.sanitize else "release")
    try:
        print(build_library(args.out, folder, [*STRICT_FLAGS, *(SANITIZE_FLAGS if args.sanitize else [])]))
    except BuildError as error:
        print(f"custom_ops: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
