"""The device's copies of a step's memory and of the request table. Knows columns and no op."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.buffer import HostDeviceBuffer
from fastdeploy_sd.device.device import Device
from fastdeploy_sd.device.device_buffers import DeviceBuffers, Output, RowsOnDevice
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.worker.step.request_table import RequestTable

# Columns of the request table that calls of a step read, without its blocks and the counts of tokens.
_COLUMNS = (
    "tokens", "num_tokens", "max_total", "count_rows", "temperature", "top_k", "top_p", "min_p", "repetition",
    "presence", "frequency", "seed", "num_bias", "bias_token_ids", "bias_values",
)  # fmt: skip


# One for the step whose output is taken, one for the step before it (for idle time), and one for the next step.
_NUM_ENDS = 3


class _StepEnd(Output):
    """The end of a step on a device."""

    def __init__(self, device: Device, output: HostDeviceBuffer) -> None:
        self.idle_s = 0.0
        self.is_over = False
        self._begun, self._ended, self._fetcher = device.event(), device.event(), output.fetcher()
        self._drafted = device.event()
        self._last = self._ended
        self._before: _StepEnd | None = None

    def begin(self) -> None:
        """Begin a step."""
        self.is_over, self._before = False, None
        self._begun.record()

    def start(self, before: _StepEnd) -> None:
        """Start the copy of the latest step's output; `before` is the end of the step before it."""
        self._fetcher.start()
        self._ended.record()
        self._before, self._last = before, self._ended

    def extend(self) -> None:
        self._drafted.record()
        self._last = self._drafted

    def take(self) -> None:
        self._fetcher.take()
        self._ended.wait()
        before, self._before, self.is_over = self._before, None, True
        is_known = before is not None and before.is_over
        self.idle_s = max(self._begun.seconds_since(before._last), 0.0) if is_known and before is not None else 0.0


class StepBuffers(DeviceBuffers):
    """Those of a device. The host writes the columns; changed table rows and blocks are copied with the next step.

    `memory`: of the steps. table: of the requests. Raises ConfigError: the device has no memory for them.
    """

    def __init__(self, device: Device, memory: StepMemory, table: RequestTable) -> None:
        self._device, self._memory, self._table = device, memory, table
        self._plan, self._output = device.buffer(memory.inputs), device.buffer(memory.outputs)
        self._num_blocks = device.buffer(table.num_blocks)
        self._blocks, self._counts = [*map(device.buffer, table.group_blocks)], device.buffer(table.counts.table)
        self._columns = [device.buffer(getattr(table, name)) for name in _COLUMNS]
        self._forbidden = device.buffer(memory.mask_token_ids)
        self._allowed = device.buffer(memory.allowed_rows), device.buffer(memory.allowed_bits)
        self._ends = [_StepEnd(device, self._output) for _ in range(_NUM_ENDS)]
        self._turn = 0
        self._num_allowed = 0  # rows of allowed_rows that a step has sent and may not be -1
        self._whole = {
            id(mirror.array): mirror
            for mirror in (
                *self._blocks,
                self._num_blocks,
                self._counts,
                *self._columns,
                self._forbidden,
                *self._allowed,
            )
        }

    def of(self, array: npt.NDArray[Any]) -> Any:
        """Return the device's copy of an array; a new array gets one with its present content."""
        known = self._whole.get(id(array))
        if known is not None:
            return known.tensor
        for piece in (self._plan, self._output):
            if np.may_share_memory(array, piece.array):
                return piece.of(array)
        mirror = self._whole[id(array)] = self._device.buffer(array)
        return mirror.tensor

    def bind(self, op: HostOp, **arguments: Any) -> BoundCall:
        return self._device.bind(op, **{name: self._argument(value) for name, value in arguments.items()})

    def send_plan(self) -> None:
        self._turn = (self._turn + 1) % _NUM_ENDS
        self._ends[self._turn].begin()
        m, table = self._memory, self._table
        for row in table.new_rows:
            for column in self._columns:
                column.upload(row, row + 1)
            if (count_row := table.count_rows.item(row)) >= 0:
                self._counts.upload(count_row, count_row + 1)
        for row in table.rows_with_blocks:
            for blocks in self._blocks:
                blocks.upload(row, row + 1)
            self._num_blocks.upload(row, row + 1)
        table.new_rows.clear()
        table.rows_with_blocks.clear()
        self._plan.upload()
        if num_forbidden := m.cu_mask.item(m.num_logits):
            self._forbidden.upload(0, num_forbidden)

    def send_masks(self) -> None:
        rows, bits = self._allowed
        if num_rows := max(self._memory.num_allowed, self._num_allowed):
            rows.upload(0, num_rows)
            bits.upload(0, self._memory.num_allowed)
        self._num_allowed = self._memory.num_allowed

    def send_output(self) -> None:
        self._output.upload()

    def start_fetch(self) -> _StepEnd:
        end = self._ends[self._turn]
        end.start(self._ends[self._turn - 1])
        return end

    def _argument(self, value: Any) -> Any:
        if isinstance(value, RowsOnDevice):
            return value.tensor
        return self.of(value) if isinstance(value, np.ndarray) else value
