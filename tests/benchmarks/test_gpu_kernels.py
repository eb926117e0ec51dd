"""Ops on a GPU by themselves: what is run and counted, on an emulated one whose times say nothing."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.gpu_bounds import CHIPS, chip_named
from benchmarks.gpu_cases import KINDS, WANTED_SIZES, GpuCase, GpuSizes, gpu_cases
from benchmarks.gpu_kernels import PEERS, GpuRates, Timer, cost_of, measure_cases, measure_rates
from benchmarks.gpu_occupancy import issue_times, launches, occupancies
from benchmarks.gpu_peers import AttentionWork, GpuPeer, LinearWork, SamplingWork, Work
from custom_ops import cuda_build, cuda_report, cuda_tiles
from custom_ops.cuda_report import KernelUse
from custom_ops.cuda_tiles import Tile
from fastdeploy_sd.errors import ConfigError
from tests.ops.cuda_device import emulated

pytestmark = pytest.mark.slow

SIZES = GpuSizes(
    vocab_size=300,
    requests=3,
    rows=2,
    attention_requests=2,
    attention_rows=(1, 2),
    contexts=(70,),
    prefixes=((600, 512),),
    chunk=16,
    heads=2,
    kv_heads=1,
    head_dim=32,
    linear_rows=(1, 20),
    in_features=128,
    out_features=64,
)


def test_every_case_runs_and_counts_what_it_must_move() -> None:
    timer = Timer(emulated().device, 1024)
    rates = measure_rates(timer, 4096, 1)
    costs = list(measure_cases(timer, tuple(KINDS), SIZES, 1, rates))
    cases = list(gpu_cases(tuple(KINDS), SIZES))
    assert [cost.text for cost in costs] == [case.text for case in cases]
    assert {case.num_bytes for case in cases if case.kind == "sampling"} == {6 * 300 * 4}
    attention = {case.text: case for case in cases if case.kind == "attention"}
    two_rows = attention["2 requests x 2 rows, context 70, 2:1 heads"]
    assert two_rows.num_bytes == 2 * (2 * 70 * 32 + 2 * 2 * 64) * 2
    assert two_rows.num_operations == 4 * 2 * (70 + 69) * 64
    shared = attention["2 requests x 2 rows, context 600, 2:1 heads, 512 shared"]
    assert shared.num_bytes == 2 * ((512 + 2 * 88) * 32 + 2 * 2 * 64) * 2
    assert shared.num_operations == 4 * 2 * (600 + 599) * 64
    linear = next(case for case in cases if case.text == "bfloat16 128x64, 20 rows")
    assert (linear.num_bytes, linear.num_operations) == (128 * 64 * 2 + 20 * 192 * 2, 2 * 20 * 128 * 64)


def test_shares_are_of_the_rates_that_were_measured() -> None:
    case = GpuCase("linear", "", lambda _: (), 3_000_000_000, 8_000_000_000_000)
    cost = cost_of(case, 2.0, GpuRates(3.0, 16.0))
    assert (cost.us, cost.gb_per_s, cost.copy_share) == (2e6, 1.5, 0.5)
    assert (cost.tflop_per_s, cost.matmul_share) == (4.0, 0.25)
    assert cost_of(case, 2.0, GpuRates(3.0, None)).matmul_share is None
    assert cost.bound_us is None


def test_bounds_are_of_what_limits_a_gpu() -> None:
    h100 = chip_named("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    few = GpuCase("linear", "", lambda _: (), 3_352_000_000, 989_000_000, "bfloat16")
    many = replace(few, num_operations=2 * 1_979_000_000_000, numbers="int8")
    bounds = [h100.bound(case.num_bytes, case.num_operations, case.numbers) for case in (few, many)]
    assert [limit for _, limit in bounds] == ["memory", "products"]
    assert [seconds for seconds, _ in bounds] == pytest.approx([1e-3, 2e-3])
    cost = cost_of(many, 4e-3, GpuRates(3.0, None), h100)
    assert cost.bound_us == pytest.approx(2e3)
    assert cost.bound_share == pytest.approx(0.5)
    a100 = chip_named("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    assert a100.bound(0, 312 * 10**12, "fp8")[0] == pytest.approx(1.0)
    assert chip_named("emulated GPU") is None


def test_a_gpu_is_filled_by_as_many_blocks_as_its_registers_and_shared_memory_allow() -> None:
    h100, small = (chip_named(name) for name in ("H100", "RTX 4090"))
    assert h100 is not None
    assert small is not None
    assert h100.occupancy(32, 0, 1024) == 1.0
    assert h100.occupancy(128, 0, 256) == 0.25
    assert h100.occupancy(64, 100 << 10, 128) == 0.125
    assert small.occupancy(64, 99 << 10, 128) == pytest.approx(128 / 1536)
    assert small.occupancy(64, 163 << 10, 128) == 0.0


def test_occupancy_is_of_compiled_registers_and_launched_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the GPUs that there is code for; no kernel runs."""
    device, uses = emulated().device, list[KernelUse]()
    monkeypatch.setattr(cuda_report, "report", lambda: uses)
    num_launches = emulated().num_launches()
    h100 = chip_named("H100")
    assert h100 is not None
    launched = [launch for case in gpu_cases(tuple(KINDS), SIZES) for launch in launches(device, h100, case)]
    assert emulated().num_launches() == num_launches
    uses += [KernelUse("sm_90a", kernel.replace(" ", "  "), 64, 0, 1024) for _, _, kernel in launched]
    tile = Tile(100, 32_768, 512, "bfloat16")
    monkeypatch.setattr(cuda_tiles, "tiles", lambda _, name, wanted: {k.kernel: tile for k in uses if wanted(k.kernel)})
    found = list(occupancies(tuple(KINDS), SIZES))
    assert {one.tile for one in found} == {tile}
    assert {one.gpu for one in found} == {"H100", "H200"}
    assert {(one.threads, one.shared_bytes - 1024, one.kernel) for one in found} == set(launched)
    assert {one.kind for one in found} == set(KINDS)
    assert all(one.share == h100.occupancy(64, one.shared_bytes, one.threads) for one in found)
    assert any(threads > 0 and dynamic_bytes > 0 for threads, dynamic_bytes, _ in launched)
    del uses[1:]
    with pytest.raises(ConfigError, match="to be compiled for sm_90a, it is not"):
        list(occupancies(tuple(KINDS), SIZES))


def test_instructions_allow_a_part_of_the_rate_of_products_or_of_memory() -> None:
    """Four are issued in a clock by each multiprocessor."""
    h100, old = (chip_named(name) for name in ("H100", "A100"))
    assert h100 is not None
    assert old is not None
    issued = 4 * 132 * 1.83e9
    assert h100.issue_share(Tile(512, 524_288, 64, "bfloat16")) == pytest.approx(issued * 1024 / 989e12)
    assert h100.issue_share(Tile(512, 524_288, 64, "fp8")) == pytest.approx(issued * 1024 / 1979e12)
    assert h100.issue_share(Tile(64, 0, 512)) == pytest.approx(issued * 8 / 3352e9)
    assert old.issue_share(Tile(512, 524_288, 0, "fp8")) == old.issue_share(Tile(512, 524_288, 0, "bfloat16"))


def test_instructions_bound_a_case_where_they_take_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the kernel that needs the fewest has for its operations, without any for its bytes."""
    h100 = chip_named("H100")
    assert h100 is not None
    issued, tiles = 4 * 132 * 1.83e9, [Tile(512, 524_288, 64), Tile(512, 262_144, 999), Tile(64, 0, 512)]
    assert h100.issue_seconds(1, 1 << 40, tiles) == pytest.approx((1 << 40) / 1024 / issued)
    assert h100.issue_seconds(1 << 30, 0, tiles[::2]) == pytest.approx((1 << 30) / 8 / issued)
    assert h100.issue_seconds(1, 1, tiles[2:]) is None
    assert h100.bound(3352, 989_000, "bfloat16", 5.0) == (5.0, "issue")
    assert h100.bound(3352, 989_000_000, "bfloat16", 1e-9)[1] == "products"

    wanted = list[str]()

    def found(library: pathlib.Path, name: str, is_wanted: Callable[[str], bool]) -> dict[str, Tile]:
        assert (library.name, name) == ("here.so", "sm_90a")
        names = [kernel for case in cases for *_, kernel in launches(emulated().device, h100, case)]
        wanted.extend(name for name in names if is_wanted(name))
        return {name: Tile(1000, 1024, 64, "bfloat16") for name in wanted if "Rows" in name or "Sample" in name}

    cases = list(gpu_cases(("linear", "sampling"), SIZES))
    monkeypatch.setattr(cuda_build, "find_tool", str)
    monkeypatch.setattr(cuda_tiles, "tiles", found)
    times = issue_times(h100, ("linear", "sampling"), SIZES, pathlib.Path("here.so"))
    for case, seconds in zip(cases, times, strict=True):
        work = case.num_bytes / 64 if case.kind == "sampling" else case.num_issued / 1024
        assert seconds == pytest.approx(work * 1000 / issued), case.text
    assert {case.num_issued / case.num_operations for case in cases if case.text.endswith(" 1 rows")} == {8}


def test_bounds_are_printed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", "/nowhere/libfdsd_cuda.so")
    assert main(["gpu-kernels", "--bounds"]) == 0
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert all(f"{chip.name} us" in head for chip in CHIPS)
    assert len(rows) == len(list(gpu_cases(tuple(KINDS), WANTED_SIZES)))
    [row] = [row for row in rows if "bfloat16 4096x4096, 8192 rows" in row]
    assert "| 167.8 | 274.9 | 881.0* |" in row


class Peer:
    """Another project's kernels for linear layers and attention, of which one fails."""

    name = "other"

    def __init__(self) -> None:
        self.asked: list[Work] = []

    def refusal(self) -> str | None:
        return None

    def seconds(self, work: Work, repeats: int) -> float | None:
        self.asked.append(work)
        if isinstance(work, AttentionWork):
            raise RuntimeError(f"no room for {work.context} keys")
        return 2e-6 * repeats if isinstance(work, LinearWork) else None


def test_other_kernels_get_the_same_work() -> None:
    peer, timer = Peer(), Timer(emulated().device, 1024)
    kinds = ("linear", "attention")
    costs = {cost.text: cost for cost in measure_cases(timer, kinds, SIZES, 1, GpuRates(3.0, None), [peer])}
    assert peer.asked[:2] == [LinearWork(1, 128, 64), LinearWork(20, 128, 64)]
    assert peer.asked[2:] == [
        AttentionWork(2, 1, 70, 2, 1, 32),
        AttentionWork(2, 2, 70, 2, 1, 32),
        AttentionWork(1, 16, 16, 2, 1, 32),
        AttentionWork(2, 1, 600, 2, 1, 32, 512),
        AttentionWork(2, 2, 600, 2, 1, 32, 512),
    ]
    assert costs["bfloat16 128x64, 20 rows"].others_us == {"other": 2.0}
    assert costs["wint8 128x64, 20 rows"].others_us == {}
    assert costs["2 requests x 1 rows, context 70, 2:1 heads"].failures == {"other": "no room for 70 keys"}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_kernels_that_are_not_there_say_so(peer: GpuPeer) -> None:
    package = {"PyTorch": "torch", "FlashInfer": "flashinfer"}[peer.name]
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    assert peer.refusal() == "not installed"


@pytest.mark.gpu
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_other_kernels_run_where_they_are(peer: GpuPeer) -> None:
    if (reason := peer.refusal()) is not None:
        pytest.skip(f"{peer.name}: {reason}")
    logits = np.zeros((2, 300), np.float32)
    works: list[Work] = [LinearWork(3, 128, 64), AttentionWork(2, 1, 70, 2, 1, 64), AttentionWork(2, 8, 70, 2, 1, 64)]
    works += [AttentionWork(2, 3, 300, 2, 1, 64, 128)]
    works += [SamplingWork(logits, 6, 1.0, k, p) for k, p in ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9))]
    for work in works:
        seconds = peer.seconds(work, 1)
        assert seconds is None or seconds > 0, work


def test_every_run_is_behind_one_that_fills_the_cache() -> None:
    order: list[int] = []
    timer = Timer(emulated().device, 1024)
    assert timer.seconds(lambda: order.append(1), 2) > 0
    assert len(order) == 3 + 2


def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", "/nowhere/libfdsd_cuda.so")
    assert main(["gpu-kernels"]) == 2
    assert "expected a GPU and kernels for it: no CUDA kernels at /nowhere" in capsys.readouterr().err
