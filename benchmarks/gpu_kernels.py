"""`bench gpu-kernels`: what ops cost on a GPU, and what its memory and matrix units reach.

Every run is timed by two events around it, after the second-level cache was filled with other bytes. Quoted are
medians.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.command import Command, Progress, show, table_of
from benchmarks.gpu_bounds import CHIPS, GpuChip, Limit, chip_named
from benchmarks.gpu_cases import KINDS, WANTED_SIZES, GpuCase, GpuSizes, gpu_cases
from benchmarks.gpu_occupancy import BUILT, OCCUPANCY_COLUMNS, issue_times, occupancies
from benchmarks.gpu_peers import FLUSH_BYTES, WARM_UPS, FlashInferPeer, GpuPeer, TorchPeer
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.library import usable_library
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.errors import ConfigError

COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuCost:
    """One case.

    Attributes:
        us: the median run.
        gb_per_s: bytes that must be moved, over that time.
        copy_share: of the rate at which the GPU copied memory.
        tflop_per_s: 0 where bytes are what counts.
        matmul_share: of the rate of PyTorch's largest product, None where there is no PyTorch.
        bound_us, bound_share: the least time on this GPU, and its part of the run; None where its figures are unknown.
        limit: what bounds it: memory, products or issue.
        others_us: the median run of other projects' kernels, by their name; of those that were asked and have any.
        failures: why one of them did not run, by its name.
    """

    kind: str
    text: str
    us: float
    gb_per_s: float
    copy_share: float
    tflop_per_s: float
    matmul_share: float | None
    bound_us: float | None = None
    bound_share: float | None = None
    limit: Limit | None = None
    others_us: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What the GPU did by itself: read and written bytes of a copy, and PyTorch's bfloat16 product; None without it."""

    copy_gb_per_s: float
    matmul_tflop_per_s: float | None


COLUMNS: dict[str, str | Callable[[GpuCost], object]] = {
    "Op": "{0.kind}",
    "Case": "{0.text}",
    "us": "{0.us:.1f}",
    "GB/s": "{0.gb_per_s:.0f}",
    "of a copy": "{0.copy_share:.0%}",
    "TFLOP/s": lambda cost: f"{cost.tflop_per_s:.1f}" if cost.tflop_per_s > 0 else None,
    "of a matmul": lambda cost: None if cost.matmul_share is None else f"{cost.matmul_share:.0%}",
    "Bound us": lambda cost: None if cost.bound_us is None else f"{cost.bound_us:.1f}",
    "of the bound": lambda cost: None if cost.bound_share is None else f"{cost.bound_share:.0%}",
    "Bound by": lambda cost: cost.limit,
}
PEERS: tuple[GpuPeer, ...] = (TorchPeer(), FlashInferPeer())


def main(argv: Sequence[str]) -> int:
    """Time the cases, print a table."""
    command = Command("gpu-kernels", "Time ops on a GPU, and the rates of its memory and matrix units.")
    command.some("--ops", tuple(KINDS), "(default: all)", tuple(KINDS))
    command.number("--repeats", 20, "runs of every case")
    text = "also the same work by PyTorch and FlashInfer, where they are installed"
    command.add_argument("--peers", action="store_true", help=text)
    text = "print what every case moves and multiplies, and its bound on several GPUs, that of instructions too where"
    text += " the kernels are compiled; needs no GPU"
    command.add_argument("--bounds", action="store_true", help=text)
    text = "print how full multiprocessors are of each kernel, as `cuda_build.py --nvcc` compiled it, and what its"
    text += " instructions allow of their rate; needs no GPU"
    command.add_argument("--occupancy", action="store_true", help=text)
    command.json()
    args = command.read(argv)
    if args.bounds:
        show(args, {"bounds": list(bounds_of(args.ops, WANTED_SIZES))}, bounds_table(args.ops, WANTED_SIZES))
        return 0
    if args.occupancy:
        kernels = list(occupancies(args.ops))
        show(args, {"kernels": kernels}, table_of(kernels, OCCUPANCY_COLUMNS))
        return 0
    device = the_gpu()
    timer = Timer(device)
    rates = measure_rates(timer, COPY_BYTES, args.repeats)
    refusals = {peer.name: peer.refusal() for peer in PEERS if args.peers}
    peers = [peer for peer in PEERS if refusals.get(peer.name, "not asked") is None]
    costs = list(measure_cases(timer, args.ops, WANTED_SIZES, args.repeats, rates, peers))
    result = {"gpu": device.text, "rates": rates, "refusals": refusals, "costs": costs}
    matmul = "no matmul" if rates.matmul_tflop_per_s is None else f"matmul {rates.matmul_tflop_per_s:.0f} TFLOP/s"
    lines = [f"{device.text}: copy {rates.copy_gb_per_s:.0f} GB/s, {matmul}."]
    lines += [f"{name}: {reason}" for name, reason in refusals.items() if reason is not None]
    lines += [f"{name}, {cost.text}: {reason}" for cost in costs for name, reason in cost.failures.items()]
    columns = COLUMNS | {f"{peer.name} us": _others_us(peer.name) for peer in peers}
    show(args, result, "\n".join([table_of(costs, columns), "", *lines]))
    return 0


def _others_us(name: str) -> Callable[[GpuCost], object]:
    return lambda cost: f"{cost.others_us[name]:.1f}" if name in cost.others_us else None


def the_gpu() -> CudaDevice:
    """Return the first GPU.

    Raises:
        ConfigError: there is none, or no kernels for it; the text says which.
    """
    found = usable_library()
    if isinstance(found, str):
        raise ConfigError(f"gpu-kernels: expected a GPU and kernels for it: {found}")
    return CudaDevice(found)


def measure_rates(timer: Timer, num_bytes: int, repeats: int) -> GpuRates:
    """Measure how fast the GPU copies so many bytes, and multiplies where PyTorch is installed."""
    device = timer.device
    source, target = (device.zeros((num_bytes,), "uint8") for _ in range(2))

    def copy() -> None:
        device.library.call("start_copy", target.address, source.address, ctypes.c_int64(num_bytes), device.stream)

    seconds = timer.seconds(copy, repeats)
    return GpuRates(2 * num_bytes / seconds / 1e9, TorchPeer().matmul_tflop_per_s(repeats))


def measure_cases(
    timer: Timer,
    kinds: Sequence[str],
    sizes: GpuSizes,
    repeats: int,
    rates: GpuRates,
    peers: Sequence[GpuPeer] = (),
) -> Iterator[GpuCost]:
    """Time every case of these kinds, and the peers' work for each."""
    progress, chip = Progress(len(kinds), "gpu-kernels"), chip_named(timer.device.text)
    issued = iter(() if chip is None else issue_times(chip, kinds, sizes, timer.device.library.path))
    for kind in kinds:
        for case in gpu_cases([kind], sizes):
            seconds = timer.seconds(_runs(case.bind(timer.device)), repeats)
            cost = cost_of(case, seconds, rates, chip, next(issued, None))
            yield _beside(cost, case, peers, repeats)
        progress.advance(kind)


def _beside(cost: GpuCost, case: GpuCase, peers: Sequence[GpuPeer], repeats: int) -> GpuCost:
    others_us: dict[str, float] = {}
    failures: dict[str, str] = {}
    for peer in peers:
        if case.work is None:
            break
        try:
            seconds = peer.seconds(case.work, repeats)
        except RuntimeError as error:  # of memory, or another version of it: the other figures are worth having
            failures[peer.name] = str(error)
            continue
        if seconds is not None:
            others_us[peer.name] = seconds * 1e6
    return replace(cost, others_us=others_us, failures=failures)


def bounds_of(kinds: Sequence[str], sizes: GpuSizes) -> Iterator[dict[str, Any]]:
    """Return what every case moves and multiplies, and its bound on every GPU of the table.

    Instructions count where the kernels of this checkout are compiled for the GPU.
    """
    issued = {chip.name: issue_times(chip, kinds, sizes) if BUILT.exists() else None for chip in CHIPS}
    for i, case in enumerate(gpu_cases(kinds, sizes)):
        bounds = {}
        for chip in CHIPS:
            own = issued[chip.name]
            seconds = None if own is None else own[i]
            bounds[chip.name] = chip.bound(case.num_bytes, case.num_operations, case.numbers, seconds)
        yield {
            "kind": case.kind,
            "text": case.text,
            "num_bytes": case.num_bytes,
            "num_operations": case.num_operations,
            "numbers": case.numbers,
            "bounds": {name: {"us": seconds * 1e6, "limit": limit} for name, (seconds, limit) in bounds.items()},
        }


def bounds_table(kinds: Sequence[str], sizes: GpuSizes) -> str:
    """Return the bounds as Markdown; a bound of products, not of memory, has a star, one of instructions a plus."""
    marks = {"memory": "", "products": "*", "issue": "+"}

    def bound_on(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['bounds'][name]['us']:.1f}{marks[row['bounds'][name]['limit']]}"

    columns: dict[str, str | Callable[[dict[str, Any]], object]] = {
        "Op": "{0[kind]}",
        "Case": "{0[text]}",
        "MB": lambda row: f"{row['num_bytes'] / 1e6:.1f}",
        "GFLOP": lambda row: f"{row['num_operations'] / 1e9:.1f}" if row["num_operations"] else None,
        **{f"{chip.name} us": bound_on(chip.name) for chip in CHIPS},
    }
    return table_of(list(bounds_of(kinds, sizes)), columns)


def _runs(calls: Sequence[BoundCall]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call.run()

    return run


def cost_of(
    case: GpuCase, seconds: float, rates: GpuRates, chip: GpuChip | None = None, issued: float | None = None
) -> GpuCost:
    """Return what a case costs that takes so long; `issued`: as for GpuChip.bound."""
    gb_per_s, tflop_per_s = case.num_bytes / seconds / 1e9, case.num_operations / seconds / 1e12
    peak = rates.matmul_tflop_per_s if case.num_operations > 0 else None
    share = None if peak is None else tflop_per_s / peak
    cost = GpuCost(case.kind, case.text, seconds * 1e6, gb_per_s, gb_per_s / rates.copy_gb_per_s, tflop_per_s, share)
    if chip is None:
        return cost
    bound_s, limit = chip.bound(case.num_bytes, case.num_operations, case.numbers, issued)
    return replace(cost, bound_us=bound_s * 1e6, bound_share=bound_s / seconds, limit=limit)


class Timer:
    """Times what is put on a device's stream, by events, each run after one that fills the second-level cache.

    Args:
        flush_bytes: that are written in between.
    """

    def __init__(self, device: CudaDevice, flush_bytes: int = FLUSH_BYTES) -> None:
        self.device, self._flush_bytes = device, flush_bytes
        self._flushed = device.zeros((flush_bytes,), "uint8")
        self._begin, self._end = (device.library.made("event_create") for _ in range(2))

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        """Return the median time of a run."""
        times = [self._seconds(run) for _ in range(WARM_UPS + repeats)]
        return median(times[WARM_UPS:])

    def _seconds(self, run: Callable[[], Any]) -> float:
        library, stream = self.device.library, self.device.stream
        library.call("zero", self._flushed.address, ctypes.c_int64(self._flush_bytes), stream)
        library.call("event_record", self._begin, stream)
        run()
        library.call("event_record", self._end, stream)
        library.call("event_synchronize", self._end)
        milliseconds = ctypes.c_float()
        library.call("event_elapsed", self._begin, self._end, ctypes.byref(milliseconds))
        return max(milliseconds.value, 1e-6) / 1e3
