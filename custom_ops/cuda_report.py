"""What every CUDA kernel takes of a GPU, as ptxas said when cuda_build.py compiled it. Standard library only."""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from custom_ops import cuda_build


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


def report(folder: pathlib.Path = cuda_build.BUILD / "cuda") -> list[KernelUse]:
    """Return what every kernel takes on every architecture, as ptxas said when `build_cuda` compiled it."""
    found = [use for path in cuda_build.kernel_sources() for use in _uses((folder / f"{path.stem}.ptxas").read_text())]
    short = short_names([use.kernel for use in found])
    return [replace(use, kernel=name) for use, name in zip(found, short, strict=True)]


def short_names(names: Sequence[str]) -> list[str]:
    """Return kernels' names as C++ writes them, without arguments and our namespaces."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = [re.sub(r"^void |fdsd::|cuda::|\(anonymous namespace\)::", "", name) for name in done.stdout.splitlines()]
    return [re.sub(r"\([^()]*\)$", "", name) for name in plain]


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
