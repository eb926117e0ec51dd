"""How full a GPU's multiprocessors are of each kernel of the timed cases, and what its instructions allow: what ptxas
said of the compiled kernel, and the threads and shared memory of its launches, which the emulated GPU notes without
running them. Instructions are known where cuobjdump is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu_bounds import CHIPS, GpuChip
from benchmarks.gpu_cases import WANTED_SIZES, GpuCase, GpuSizes, gpu_cases
from custom_ops import build, cuda_build, cuda_report, cuda_tiles
from custom_ops.cuda_report import KernelUse
from custom_ops.cuda_tiles import Tile
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.library import load
from fastdeploy_sd.errors import ConfigError

_log = logging.getLogger(__name__)
BUILT = cuda_build.BUILD / "cuda" / cuda_build.LIBRARY

# Blocks of a kernel are alike however many there are, so fewer requests need less of the host's memory.
SIZES = replace(
    WANTED_SIZES, requests=4, attention_requests=2, contexts=(4096,), prefixes=((8192, 4096),), chunk=512,
    linear_rows=(1, 16, 64, 2048),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One kernel on one GPU.

    Attributes:
        registers, threads: of a thread; of a block.
        shared_bytes: of a block, all together.
        share: of a multiprocessor's threads, that are there at a time.
        tile: what a warp does in a turn; None where it is not known, or nothing is multiplied or loaded.
        issue_share: of the rate of matrix units or memory, that the tile's instructions allow.
    """

    kind: str
    kernel: str
    gpu: str
    registers: int
    threads: int
    shared_bytes: int
    share: float
    tile: Tile | None
    issue_share: float | None


OCCUPANCY_COLUMNS: Mapping[str, str | Callable[[Occupancy], object]] = {
    "Op": "{0.kind}",
    "Kernel": "`{0.kernel}`",
    "GPU": "{0.gpu}",
    "Registers": "{0.registers}",
    "Threads": "{0.threads}",
    "Shared bytes": "{0.shared_bytes}",
    "Occupancy": "{0.share:.0%}",
    "Tile": lambda one: None if one.tile is None else one.tile.text,
    "Issue limit": lambda one: None if one.issue_share is None else f"{one.issue_share:.0%}",
}


def occupancies(kinds: Sequence[str], sizes: GpuSizes = SIZES) -> Iterator[Occupancy]:
    """Return each kernel of these kinds on every GPU of the table that the kernels were compiled for.

    Raises:
        ConfigError: they were compiled for none, or one of them was not.
    """
    try:
        uses = cuda_report.report()
    except FileNotFoundError as error:
        text = "occupancy: expected kernels that `python custom_ops/cuda_build.py --nvcc` has compiled, got none"
        raise ConfigError(text) from error
    except build.BuildError as error:
        raise ConfigError(f"occupancy: {error}") from error
    device = CudaDevice(load(cuda_build.build_emulated()))
    for chip in CHIPS:
        own = {_canonical(use.kernel): use for use in uses if use.architecture == f"sm_{chip.architecture}"}
        yield from _on(chip, own, device, kinds, sizes) if own else ()


def _on(
    chip: GpuChip, uses: Mapping[str, KernelUse], device: CudaDevice, kinds: Sequence[str], sizes: GpuSizes
) -> Iterator[Occupancy]:
    cases = gpu_cases(kinds, sizes)
    launched = dict.fromkeys((case.kind, *launch) for case in cases for launch in launches(device, chip, case))
    tiles = _tiles(BUILT, chip.architecture, frozenset(_canonical(kernel) for *_, kernel in launched))
    for kind, threads, dynamic_bytes, kernel in launched:
        use, tile = uses.get(_canonical(kernel)), tiles.get(_canonical(kernel))
        if use is None:
            raise ConfigError(f"occupancy: expected {kernel} to be compiled for sm_{chip.architecture}, it is not")
        shared_bytes = use.shared_bytes + dynamic_bytes
        share = chip.occupancy(use.registers, shared_bytes, threads)
        issue_share = None if tile is None else chip.issue_share(tile)
        yield Occupancy(kind, kernel, chip.name, use.registers, threads, shared_bytes, share, tile, issue_share)


def issue_times(
    chip: GpuChip, kinds: Sequence[str], sizes: GpuSizes = WANTED_SIZES, library: pathlib.Path = BUILT
) -> Sequence[float | None]:
    """Return the least seconds of each case that instructions of a compiled library allow on a GPU.

    None where they are not known: without cuobjdump, or code for this GPU, of all cases.
    """
    cases = list(gpu_cases(kinds, sizes))
    try:
        cuda_build.find_tool("cuobjdump")
        device = CudaDevice(load(cuda_build.build_emulated()))
    except build.BuildError as error:
        _log.warning("no bounds of instructions: %s", error)
        return [None] * len(cases)
    few = replace(sizes, requests=min(sizes.requests, 4), attention_requests=min(sizes.attention_requests, 2))
    kernels = [[_canonical(kernel) for *_, kernel in launches(device, chip, case)] for case in gpu_cases(kinds, few)]
    tiles = _tiles(library, chip.architecture, frozenset(name for own in kernels for name in own))
    return [
        chip.issue_seconds(
            case.num_bytes, case.num_issued or case.num_operations, [tiles[name] for name in own if name in tiles]
        )
        for case, own in zip(cases, kernels, strict=True)
    ]


@functools.cache
def _tiles(library: pathlib.Path, architecture: str, wanted: frozenset[str]) -> Mapping[str, Tile]:
    """By canonical names; empty where there is no cuobjdump, or no code for the architecture."""
    try:
        found = cuda_tiles.tiles(library, f"sm_{architecture}", lambda kernel: _canonical(kernel) in wanted)
    except build.BuildError as error:
        _log.warning("no instructions: %s", error)
        return {}
    return {_canonical(kernel): tile for kernel, tile in found.items()}


def launches(device: CudaDevice, chip: GpuChip, case: GpuCase) -> list[tuple[int, int, str]]:
    """Return threads, bytes of dynamic shared memory and kernel of what an emulated chip would launch."""
    functions = device.library.functions
    functions.fdsd_cuda_noted_launches.restype = ctypes.c_char_p
    functions.fdsd_cuda_set_architecture(int(chip.architecture.rstrip("a")))
    functions.fdsd_cuda_note_launches(1)
    try:
        for call in case.bind(device):
            call.run()
        device.wait()
        text: bytes = functions.fdsd_cuda_noted_launches()
    finally:
        functions.fdsd_cuda_note_launches(0)
        functions.fdsd_cuda_set_architecture(90)
    parts = [line.split(" ", 2) for line in text.decode().splitlines()]
    return [(int(threads), int(dynamic_bytes), kernel) for threads, dynamic_bytes, kernel in parts]


def _canonical(kernel: str) -> str:
    """A kernel's name without what compilers spell differently."""
    return re.sub(r"\(\w+\)|\s", "", kernel)
