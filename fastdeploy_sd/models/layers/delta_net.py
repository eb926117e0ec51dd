"""A gated delta net over the recurrent states of the requests, in the place of self-attention."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.models.layers.linear import AdaptedLayer, Linear
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.delta_memory import DeltaMemory, DeltaWeights
from fastdeploy_sd.ops.gated_delta import gated_delta_net_


class GatedDeltaNet:
    """Project, convolve, move the states on by the rows, read them, project back.

    Args:
        qkvz: [T, 2 * K + 2 * V] of the rank's heads. beta_and_decay: [T, 2 * Hv].
    """

    def __init__(
        self, qkvz: Linear, beta_and_decay: Linear, weights: DeltaWeights[Tensor], output: AdaptedLayer
    ) -> None:
        self._qkvz, self._beta_and_decay, self._weights, self._output = qkvz, beta_and_decay, weights, output

    def __call__(self, x: Tensor, memory: DeltaMemory[Tensor], inputs: AttentionInputs) -> Tensor:
        """x [T, H] -> [T, H], or [n, H] of the wanted rows; moves the requests' states on."""
        assert inputs.states is not None, "a model with recurrent states has them in every step"
        qkvz, numbers = (make(x, slots=inputs.adapter_slots) for make in (self._qkvz, self._beta_and_decay))
        y = gated_delta_net_(qkvz, numbers, self._weights, memory, inputs.states, inputs.query_start_loc)
        if inputs.outputs is not None:
            y = gather_output_rows(y, inputs.outputs.indices)
        return self._output(y, slots=inputs.adapter_slots)

    def store_kv(self, x: Tensor, memory: DeltaMemory[Tensor], inputs: AttentionInputs) -> None:
        """Only move the requests' states on."""
        self(x, memory, inputs)
