"""Low-rank adapters of a decoder: slots in the device's memory for every layer that they can change, and their filling.

Source: arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.device.device import constant, device
from fastdeploy_sd.errors import CheckpointError, suggest
from fastdeploy_sd.models.adapted_linears import UNCHANGED, AdaptedLinear
from fastdeploy_sd.models.weights.peft import PeftAdapter
from fastdeploy_sd.ops.adapter_slots import AdapterSlots
from fastdeploy_sd.ops.bf16 import narrow, storage, widen
from fastdeploy_sd.types import F32, I32


class _Layer(NamedTuple):
    """What a slot of a layer holds, see AdapterSlots; a, b: None = the adapter does not change the layer."""

    ranks: I32
    scales: F32
    a: npt.NDArray[np.generic] | None = None
    b: npt.NDArray[np.generic] | None = None


class ReadAdapter(NamedTuple):
    """An adapter in the form of slots; `digest`: of its files."""

    digest: str
    layers: Sequence[_Layer]


class Adapters:
    """The adapters of one rank, each in a slot.

    Args:
        num_slots, max_rank: at least 1.
        dtype: of the activations, which is also that of the matrices here.

    Attributes:
        num_bytes: of the memory.
    """

    def __init__(self, num_slots: int, max_rank: int, dtype: str) -> None:
        self.num_slots, self.max_rank, self._dtype = num_slots, max_rank, storage(dtype)
        self._linears: list[tuple[AdaptedLinear, AdapterSlots[Tensor]]] = []
        self._shapes: dict[str, tuple[int, int]] = {}
        self.num_bytes = 0

    def add(self, linear: AdaptedLinear) -> AdapterSlots[Tensor]:
        """Allocate the slots of a layer; raises MemoryError, OSError: the device has not that much."""
        num_parts, num_rows = len(linear.num_rows), linear.num_rows
        slots = AdapterSlots(
            a=device().zeros((self.num_slots, num_parts * self.max_rank, len(linear.inputs)), self._dtype),
            b=device().zeros((self.num_slots, self.max_rank, sum(num_rows)), self._dtype),
            ranks=device().zeros((self.num_slots, num_parts), np.int32),
            scales=device().zeros((self.num_slots, num_parts), np.float32),
            part_ends=constant(np.cumsum(num_rows).astype(np.int32)),
        )
        self._linears.append((linear, slots))
        self._shapes |= linear.shapes
        self.num_bytes += linear.num_bytes(self.num_slots, self.max_rank, self._dtype.itemsize)
        return slots

    def digest(self, folder: Path) -> str:
        """Return 32 hexadecimal digits of an adapter that can be loaded; raises CheckpointError as `read`.

        Any thread may call it.
        """
        return self._open(folder).digest()

    def read(self, folder: Path) -> ReadAdapter:
        """Return an adapter as the slots of this rank hold it. Any thread may call it.

        Raises CheckpointError, with file and tensor: the folder holds no adapter, one that asks for more than low-rank
        matrices of the layers here, or one of another model.
        """
        adapter = self._open(folder)
        return ReadAdapter(adapter.digest(), [self._read(linear, adapter) for linear, _ in self._linears])

    def fill(self, slot: int, adapter: ReadAdapter) -> None:
        """Fill a slot that no row in flight uses."""
        for (_, slots), own in zip(self._linears, adapter.layers, strict=True):
            if own.a is not None and own.b is not None:
                _write(slots.a, slot, own.a)
                _write(slots.b, slot, own.b)
            _write(slots.scales, slot, own.scales)
            _write(slots.ranks, slot, own.ranks)

    def clear(self, slot: int) -> None:
        """Empty a slot: rows in it are computed as without an adapter."""
        for linear, slots in self._linears:
            _write(slots.ranks, slot, np.zeros(len(linear.num_rows), np.int32))

    def _open(self, folder: Path) -> PeftAdapter:
        adapter = PeftAdapter(folder)
        self._verify_modules(adapter)
        for module in adapter.modules:
            for data in adapter.matrices(module)[:2]:
                if not np.isfinite(widen(narrow(data, self._dtype))).all():
                    raise CheckpointError(f"{adapter.path}: {module}: expected finite numbers, got others")
        return adapter

    def _verify_modules(self, adapter: PeftAdapter) -> None:
        for module, (rank, shape) in adapter.modules.items():
            for name, reason in UNCHANGED.items():
                if name in f"{module}.":
                    raise CheckpointError(f"{adapter.path}: {module}: expected no adapter of it, as {reason}")
            if module not in self._shapes:
                known = sorted({name.split(".", 2)[2] for name in self._shapes})
                raise CheckpointError(
                    f"{adapter.path}: {module}: expected modules of the model that adapters can change"
                    f" ({', '.join(known)} of its layers), got another{suggest(module, self._shapes)}"
                )
            if shape != self._shapes[module]:
                wanted, got = (f"{out} outputs of {inputs} inputs" for out, inputs in (self._shapes[module], shape))
                raise CheckpointError(f"{adapter.path}: {module}: expected {wanted}, as the model has, got {got}")
            if rank > self.max_rank:
                raise CheckpointError(
                    f"{adapter.path}: {module}: expected a rank of at most max_lora_rank, {self.max_rank}, got {rank}"
                )
        for linear, _ in self._linears:
            found = [name for name in linear.modules if name in adapter.modules]
            changed = [part for name in found for part in linear.modules[name].parts]
            if len(changed) > len(set(changed)):
                fused = max(found, key=lambda name: len(linear.modules[name].parts)).rpartition(".")[2]
                raise CheckpointError(f"{adapter.path}: expected {fused} or its parts, got {', '.join(found)}")

    def _read(self, linear: AdaptedLinear, adapter: PeftAdapter) -> _Layer:
        num_parts = len(linear.num_rows)
        found = {name: adapter.matrices(name) for name in linear.modules if name in adapter.modules}
        ranks, scales = np.zeros(num_parts, np.int32), np.zeros(num_parts, np.float32)
        if not found:
            return _Layer(ranks, scales)
        a: F32 = np.zeros((num_parts, self.max_rank, len(linear.inputs)), np.float32)
        ends = np.cumsum(linear.num_rows)
        b: F32 = np.zeros((self.max_rank, ends[-1]), np.float32)
        for module, matrices in found.items():
            rank = len(matrices.a)
            for part, rows in linear.modules[module].parts.items():
                ranks[part], scales[part] = rank, matrices.scale
                a[part, :rank] = matrices.a[:, linear.inputs.start : linear.inputs.stop]
                own = np.concatenate([matrices.b[part_rows.start : part_rows.stop] for part_rows in rows])
                b[:rank, ends[part] - len(own) : ends[part]] = own.T
        return _Layer(ranks, scales, narrow(a.reshape(-1, a.shape[2]), self._dtype), narrow(b, self._dtype))


def _write(tensor: Tensor, slot: int, array: np.ndarray) -> None:
    device().write(tensor, np.ascontiguousarray(array)[None], slot)
