"""The objects that all steps of a rank share. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.device.device_buffers import HOST_BUFFERS, DeviceBuffers
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.worker.step.forward import Forward
from fastdeploy_sd.worker.step.layer_signals import LayerSignals
from fastdeploy_sd.worker.step.request_table import RequestTable


@dataclass(frozen=True, slots=True, eq=False)
class StepResources:
    """Made once, when the model is loaded.

    Attributes:
        forward: runs the decoder over its KV caches.
        memory: of the steps; they return views of it.
        table: the requests.
        signals: of the forward pass, None = none.
        buffers: of the memory and the table, where the model is on a device.
    """

    forward: Forward
    memory: StepMemory
    table: RequestTable
    signals: LayerSignals | None = None
    buffers: DeviceBuffers = HOST_BUFFERS
