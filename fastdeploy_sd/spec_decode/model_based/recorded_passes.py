"""The passes of a drafting step of a model as one native call.

`run_passes` runs once on symbolic tensors when the model is loaded; a step replays its ops, with the same bits. A
recording of a single layer ends where no request wants a further draft. Several layers have one recording per number
of drafts, in one arena. On a GPU, sizes are rounded up: see device/cuda/program.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.program.program import Padding, Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.ops.logprob_rows import logit_rows
from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory
from fastdeploy_sd.spec_decode.model_based.loaded_model import LoadedDraftModel
from fastdeploy_sd.spec_decode.model_based.passes import DraftStep, block_sizes_of, run_passes
from fastdeploy_sd.types import F32, I32

_BLOCK_SIZES = ("num_drafts", "num_block_rows")


class RecordedPasses:
    """Replays recorded ops; arguments as EagerPasses'. A run overwrites the result of the one before.

    `has_logits`: whether a step may want logits: nothing is recorded later. Raises ConfigError: the system has no
    memory for steps as large as they can be.
    """

    def __init__(
        self,
        target: LoadedDraftModel,
        memory: DraftMemory,
        min_prob: float,
        max_steps: int,
        *,
        has_logits: bool,
    ) -> None:
        self._target, self._memory, self._min_prob, self._max_steps = target, memory, min_prob, max_steps
        self._device = device()
        self._columns = self._device.buffer(memory.columns)
        self._columns.download()  # allocates its pinned memory now, not in a step
        self._device.wait()
        recordings = {
            (num_steps, wants_logits): self._record(num_steps, wants_logits=wants_logits)
            for num_steps in {*range(len(memory.num_tokens)), max_steps}
            for wants_logits in ((True, False) if has_logits else (False,))
        }
        arena = self._device.arena(max(recording.num_bytes for recording in recordings.values()))
        inputs = self._inputs()
        self._size_names = tuple(self._bounds())
        self._programs = {key: self._device.program(recording, inputs, arena) for key, recording in recordings.items()}
        logits = iter(logit_rows(*(output for program in self._programs.values() for output in program.outputs)))
        self._logits = {key: [next(logits) for _ in program.outputs] for key, program in self._programs.items()}

    def run(self, *, wants_logits: bool) -> Sequence[F32 | RowsOnDevice]:
        m = self._memory
        is_short = m.num_steps < len(m.num_tokens)
        key = m.num_steps if is_short else self._max_steps, wants_logits
        program = self._programs[key]
        self._columns.upload()
        program.run(self._sizes(m.count, m.num_tokens, m.num_drafting))
        self._columns.download(m.num_read)
        self._device.wait()
        return self._logits[key]

    def start(self, num_requests: int, num_tokens: Sequence[int], num_drafting: Sequence[int]) -> None:
        """Start the passes of the step in the device's columns, with upper bounds of its sizes."""
        num_steps = len(num_drafting) - list(num_drafting).count(0)
        key = num_steps if num_steps < len(num_tokens) else self._max_steps, False
        self._programs[key].run(self._sizes(num_requests, num_tokens, num_drafting))

    def _sizes(self, num_requests: int, num_tokens: Sequence[int], num_drafting: Sequence[int]) -> dict[str, int]:
        of_block = block_sizes_of(self._target, num_tokens, num_drafting) or ()
        return dict(zip(self._size_names, (num_requests, *num_tokens, *num_drafting, *of_block), strict=True))

    def twin(self, column: I32 | F32) -> Any:
        """Return the device's column of the memory."""
        return self._columns.of(column)

    def send(self) -> None:
        """Send the memory's columns with what goes up next."""
        self._columns.upload()

    def _record(self, num_steps: int, wants_logits: bool) -> Recording:
        recorder, m, requests = Recorder(), self._memory, Size("num_requests")
        shapes: dict[str, tuple[int | Size, ...]] = dict.fromkeys(m.per_request(), (requests,))
        shapes |= dict.fromkeys(m.offsets(), (requests + 1,))
        of_block = [Size(name) for name in _BLOCK_SIZES]
        shapes |= {name: (of_block[0] + (name == "draft_offsets"),) for name in m.of_draft}
        columns: dict[str, Any] = {
            name: recorder.add_input(name, self._dtype(name), shapes.get(name, tuple(array.shape)))
            for name, array in self._inputs().items()
        }
        num_tokens = [Size(f"num_tokens_{layer}") for layer in range(len(m.num_tokens))]
        num_drafting = [Size(f"num_drafting_{i}") for i in range(len(m.num_drafting))]
        sizes = None if self._target.model.block is None else (of_block[0], of_block[1])
        step = DraftStep.over(self._target, columns, num_tokens, num_drafting, num_steps, self._min_prob, sizes)
        logits: Any = run_passes(self._target, step)
        # Padding rows belong to no request: they have no slot, no draft and no row.
        padding: Padding = {name: "last" if name in m.offsets() or name == "draft_offsets" else 0 for name in shapes}
        return Recording(recorder, logits if wants_logits else (), self._bounds(), padding)

    def _inputs(self) -> dict[str, Any]:
        """Return the whole input arrays of the passes, by their names in DraftStep.over."""
        target, m = self._target, self._memory
        columns = {**m.per_request(), **m.offsets(), **m.per_draft(), **m.of_draft}
        tables = {"token_table": target.token_table, "block_table": target.block_table, "hidden": target.hidden}
        return {name: self._columns.of(column) for name, column in columns.items()} | tables

    def _dtype(self, name: str) -> paddle.dtype:
        if name == "hidden":
            return self._target.hidden.dtype
        return paddle.float32 if name in ("draft_prob", "min_survival", "draft_survival") else paddle.int32

    def _bounds(self) -> Mapping[str, int]:
        """Return the bound of every size, in the order of a run. A layer fills the slots of the step's tokens, unfilled
        slots of earlier steps, and those of its own drafts."""
        max_tokens, max_requests, m = self._target.hidden.shape[0], len(self._memory.begin), self._memory
        num_waiting, most = self._target.kept_hidden[0].num_kept, self._target.num_newest * max_requests
        bounds = {"num_requests": max_requests}
        for layer in range(len(m.num_tokens)):
            bounds[f"num_tokens_{layer}"] = min(max_tokens + max_requests * (num_waiting + layer), most)
        bounds |= {f"num_drafting_{i}": max_requests for i in range(len(m.num_drafting))}
        most_drafting = [max_requests] * self._max_steps
        of_block = block_sizes_of(self._target, [bounds["num_tokens_0"]], most_drafting) or ()
        return bounds | dict(zip(_BLOCK_SIZES, of_block, strict=False))
