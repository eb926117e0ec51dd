"""The emulation finds planted faults, and nothing in kernels that have none."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.ops.cuda_device import emulated, planted_kernels

pytestmark = pytest.mark.slow

MAP_FIXED_NOREPLACE = 0x100000  # of mmap: Python has no name for it
RunFault = Callable[[str, int], str | None]
# On every chip.
FAULTS = {
    "shared race": "SharedRace: block (0, 0, 0) thread 0 race: writes byte 0 of shared memory .*, which thread 63 read",
    "write after read": "race: writes byte .* of global memory [256 bytes], which thread . read with no barrier",
    "same element": "block (0, 0, 0) thread 1 race: writes byte 0 of global memory [256 bytes], which thread 0 wrote",
    "published with no barrier": "thread 1 race: writes byte 132 of .*, which thread 0 read with no barrier",
    "published for another block": "race: reads byte 0 of global memory [256 bytes], which another block wrote",
    "byte, then its word": "thread 33 race: writes byte 2 of global memory .*, which thread 0 wrote with no barrier",
    "word, then its byte": "thread 33 race: writes byte 3 of global memory .*, which thread 0 wrote with no barrier",
    "of the block before": "block (1, 0, 0) thread 0 reads byte 0 of shared memory [256 bytes] before anything",
    "block race": "block (1, 0, 0) thread 0 race: writes byte 0 of global memory .*, which another block wrote",
    "read of other block": "race: reads byte 0 of global memory [256 bytes], which another block wrote",
    "warp race": "race: .* shared memory",
    "two warps": "race: .* shared memory",
    "counter, once plain": "race: .* of global memory",
    "reads behind": "Outside: block (0, 0, 0) thread 3 out of bounds: reads bytes 256..259 of global memory",
    "writes behind": "out of bounds: writes bytes 256..259 of global memory [256 bytes]",
    "writes far before": "out of bounds: writes bytes -34359738368..-34359738365 of global memory [256 bytes]",
    "behind shared": "thread 63 out of bounds: reads bytes 256..259 of shared memory [256 bytes]",
    "before shared": "thread 0 out of bounds: reads bytes -4..-1 of shared memory [256 bytes]",
    "no dynamic memory": "out of bounds: writes bytes 0..3 of shared memory [0 bytes]",
    "misaligned": "misaligned: writes 16 bytes at byte 4 of global memory",
    "unwritten": "thread 63 reads byte 252 of shared memory [256 bytes] before anything was written there",
    "half a barrier": "deadlock: 32 threads wait for their block at .*cuda_faults.cu:.*32 have ended",
    "two barriers": "waits for its block at line .*, another thread at .*cuda_faults.cu",
    "half a warp": "deadlock: .*for their warp",
    "some lanes": "expected all lanes in the mask of a warp function, got 0000ffff",
    "copy not waited for": "CopyThenRead: .* byte 252 of shared memory [256 bytes], to which a copy is on its way",
    "copy of another, no barrier": "reads byte 4 of shared memory [256 bytes] before anything was written there",
    "copy over what is read": "race: writes byte .* of shared memory [256 bytes], which thread .* read with no barrier",
    "copy to global memory": "copies asynchronously to what is no shared memory",
    "part of a warp in a block": "expected blocks of whole warps",
    "too many threads": "expected 1..1024 threads per block",
    "too much shared memory": "Fill: expected at most .* KB of shared memory on sm_.*, got .* bytes",
    "too much together with arrays": "thread 0 expected at most .* KB of shared memory on sm_.*, got .* bytes",
    "too large arrays": "LargeArray: block (0, 0, 0) thread 0 has 53248 bytes of shared arrays, 49152 are possible",
    "memory of the host": "writes 4 bytes through a pointer to no device memory",
}
# On chips with bulk copies.
BULK_FAULTS = {
    "bulk copy not waited for": "reads byte .* of shared memory [256 bytes], to which a copy is on its way",
    "wait for another phase": "reads byte .* of shared memory [256 bytes], to which a copy is on its way",
    "more bytes than expected": "256 bytes are on their way where 240 are expected",
    "fewer bytes than expected": "waits for bytes that never come: 256 are on their way, 272 are expected",
    "bulk copy to no multiple of 16": "misaligned: writes 16 bytes at byte 8 of shared memory",
    "bulk copy from no multiple of 16": "misaligned: reads 16 bytes at byte 4 of global memory",
    "bulk copy of no multiple of 16": "misaligned: copies 248 bytes, no multiple of 16",
    "bulk copy from behind": "out of bounds: reads bytes 256..271 of global memory [256 bytes]",
    "no barrier of bytes": "uses a barrier that was not initialized",
    "a barrier twice": "initializes a barrier that is one",
    "a barrier not fenced": "copies with a barrier that was not fenced",
    "a barrier not met for": "race: .* of shared memory .*, which thread 0 wrote with no barrier between",
    "bulk copy over what is read": "race: .* byte .* of shared memory [256 bytes], which thread .* with no barrier",
    "bulk copy over what is not fenced": "copies over bytes 0..15 of .*, which threads wrote, with no fence between",
    "bulk copy, fenced too early": "copies over bytes 0..15 of .*, which threads wrote, with no fence between",
    "bulk copy, fenced elsewhere": "copies over bytes 0..15 of .*, which threads wrote, with no fence between",
}
# On Hopper, which has products of warpgroups.
WARPGROUP_FAULTS = {
    "product of what is not fenced": "multiplies what threads wrote, with no fence between",
    "product of what is written and not fenced": "multiplies what threads wrote, with no fence between",
    "product before its registers": "a product of a warpgroup before its registers are ready",
    "product written over": "race: .* byte .* of shared memory [4096 bytes], which thread .* with no barrier between",
    "product not waited for": "writes 4 bytes through a pointer to no device memory",  # as its elements are not zero
    "product of floats of what is not fenced": "multiplies what threads wrote, with no fence between",
    "product of floats before its registers": "a product of a warpgroup before its registers are ready",
    "product of floats written over": "race: .* of shared memory [4096 bytes], which thread .* with no barrier between",
    "product of floats not waited for": "writes 4 bytes through a pointer to no device memory",
}
CHIPS = (80, 86, 89, 90, 100, 120)
# Sound kernels -> the chips that have the instructions, and what the others say of them.
ON_EVERY_CHIP = (
    "shared, waited", "write after read, waited", "neighbour bytes", "bytes and their word, waited", "blocks apart",
    "published", "warp, waited", "counter", "reads the last", "two launches", "copy of its own, waited",
    "copy of another, waited", "copy over what was read", "all shared memory", "all together with arrays",
)  # fmt: skip
NO_FAULTS: dict[str, tuple[tuple[int, ...], str]] = {
    **dict.fromkeys(ON_EVERY_CHIP, (CHIPS, "")),
    "product of e4m3": ((89, 90, 100, 120), "multiplies e4m3 on sm_{}, which cannot"),
    **dict.fromkeys(
        ("bulk copy", "bulk copy, fenced by writers"),
        ((90, 100, 120), "a barrier of bulk copies on sm_{}, which has none"),
    ),
    **dict.fromkeys(
        ("product of what is written", "product", "product of floats"),
        ((90,), "a product of a warpgroup on sm_{}, which has none"),
    ),
}


@pytest.fixture(scope="module")
def run_fault() -> RunFault:
    library = ctypes.CDLL(str(planted_kernels()))
    library.run_fault.restype = ctypes.c_char_p

    def run(name: str, chip: int) -> str | None:
        error = library.run_fault(name.encode(), chip)
        return None if error is None else error.decode()

    return run


@pytest.mark.parametrize("name", [*FAULTS, *BULK_FAULTS, *WARPGROUP_FAULTS])
def test_a_planted_fault_is_found(name: str, run_fault: RunFault) -> None:
    chips = CHIPS if name in FAULTS else (90, 100, 120) if name in BULK_FAULTS else (90,)
    # Brackets of the texts are no classes of characters.
    text = {**FAULTS, **BULK_FAULTS, **WARPGROUP_FAULTS}[name]
    wanted = text.replace("[", r"\[").replace("(", r"\(").replace(")", r"\)")
    for chip in chips:
        assert re.search(wanted, str(run_fault(name, chip))), chip
        assert run_fault("shared, waited", chip) is None, "what failed before has no part in what follows"


@pytest.mark.parametrize("name", NO_FAULTS)
def test_no_fault_is_found_where_there_is_none(name: str, run_fault: RunFault) -> None:
    chips, refusal = NO_FAULTS[name]
    for chip in CHIPS:
        error = run_fault(name, chip)
        assert error is None if chip in chips else refusal.format(chip) in str(error)


def test_memory_of_the_host_may_begin_where_the_devices_ends() -> None:
    """As the system lays out pages, packed weights do so now and then."""
    device, size = emulated().device, mmap.PAGESIZE
    system = ctypes.CDLL(None)
    system.mmap.restype, system.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    pieces = {piece.address: piece for piece in [device.empty((size,), np.uint8) for _ in range(64)]}
    for end in [address + size for address in pieces]:
        if end - size not in pieces or pieces.pop(end, None) is None:
            continue
        got = system.mmap(end, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if got == end:
            break
    else:
        pytest.skip("the system lays no two pieces of memory side by side")
    host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(end))
    host[:] = np.arange(size) % 251
    copied = device.read(device.wrap(host))
    np.testing.assert_array_equal(copied, host)
    system.munmap(end, size)
