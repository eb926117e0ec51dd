"""A declared op of a model: called on NumPy arrays or Paddle tensors, or recorded. Knows no single op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device_tensor import DeviceTensor, dtype_name
from fastdeploy_sd.device.program import paddle_ops
from fastdeploy_sd.device.program.declaration import In
from fastdeploy_sd.device.program.host_op import HostOp, unpacked
from fastdeploy_sd.device.program.recorder import Recorder, SymbolicTensor, recorder_of
from fastdeploy_sd.device.tensors import from_numpy

# The arrays or tensors of one call.
A = TypeVar("A", bound=Any)


class Op(HostOp):
    """An op of a model: on NumPy arrays, on Paddle tensors, and recorded when a tensor of a recording is among them."""

    def __call__(self, **arguments: Any) -> Any:
        """Run or record the op; raises as HostOp, and OperatorsNotLoadedError on tensors without operators."""
        recorder = recorder_of(arguments.values())
        if recorder is not None:
            return self._record(recorder, arguments)
        if any(isinstance(value, Tensor) for value in arguments.values()):
            return self._run_operator(arguments)
        return super().__call__(**arguments)

    def _record(self, recorder: Recorder, arguments: Mapping[str, Any]) -> Any:
        declared = self.declaration

        def look(name: str, tensor: Any) -> tuple[str, tuple[Any, ...]]:
            if isinstance(tensor, SymbolicTensor):
                if tensor.recorder is not recorder:
                    raise declared.error(name, "a tensor of the pass that is recorded", "one of another")
            elif isinstance(tensor, DeviceTensor):
                return tensor.element, tuple(tensor.shape)
            elif not isinstance(tensor, Tensor):
                raise declared.error(name, "a tensor", type(tensor).__name__)
            elif not tensor.place.is_cpu_place() or not tensor.is_contiguous():
                raise declared.error(name, "a contiguous CPU tensor", tensor.place)
            return dtype_name(tensor.dtype), tuple(tensor.shape)

        reading = declared.read(arguments, look, declared.inputs)
        outputs = {
            name: recorder.add_tensor(getattr(paddle, dtype), declared.output_shape(name, reading))
            for name, dtype in self._output_dtypes(reading)
        }
        tensors = {name: arguments.get(name) for name in declared.inputs}
        recorder.add_call(declared.name, self.params_type(), {**tensors, **outputs, **self._numbers(reading)})
        return unpacked(tuple(outputs.values()))

    def _run_operator(self, arguments: Mapping[str, Any]) -> Any:
        declared = self.declaration
        reading = declared.read(arguments, self._look, {})
        attributes = [reading.known[name] for name in declared.attributes]
        outputs = paddle_ops.run(declared.name, *_tensors(arguments, declared.inputs), *attributes)
        return unpacked(tuple(outputs[: len(declared.outputs)]))


def _tensors(arguments: Mapping[str, Any], names: Mapping[str, In]) -> list[Any]:
    """Inputs as tensors, one tensor for an array that comes twice: Paddle frees memory by address, once."""
    made: dict[int, Any] = {}
    for name in names:
        value = arguments.get(name)
        if id(value) not in made:
            made[id(value)] = from_numpy(value) if isinstance(value, np.ndarray) else value
    return [made[id(arguments.get(name))] for name in names]
