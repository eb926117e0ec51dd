"""Logits of the hidden rows of prompts, a bounded number at a time, and the log-probabilities of the prompts' tokens;
embeddings of prompts.

A step keeps the hidden rows of all its tokens, and computes logits where a token follows. What a prompt's own tokens
need is computed after that, for requests that ask. Memory depends on the vocabulary, not on the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.program.program import Recording
from fastdeploy_sd.device.program.recorder import Recorder, Size
from fastdeploy_sd.device.step_memory import StepMemory, max_prompt_rows
from fastdeploy_sd.engine.interfaces.executor import WatchPrompts
from fastdeploy_sd.models.decoder import Decoder
from fastdeploy_sd.ops.batch import gather_output_rows
from fastdeploy_sd.ops.bf16 import widen
from fastdeploy_sd.ops.logprob_rows import logit_rows
from fastdeploy_sd.ops.sampling import token_logprobs
from fastdeploy_sd.types import F32, F64, I32, LogprobArrays, Rows
from fastdeploy_sd.worker.step.request_table import RequestTable


class RowLogits:
    """Computes logits of at most `max_rows` hidden rows of the latest step. A call overwrites those of the one before.

    Args:
        hidden: [T, H] of the step, whole.
        is_eager: whether to call the model's Python instead of recorded ops; see worker.step.forward.

    Raises ConfigError: the system has no memory for them.
    """

    def __init__(self, decoder: Decoder, hidden: Tensor, *, is_eager: bool) -> None:
        num_tokens, vocab_size = hidden.shape[0], decoder.config.vocab_size
        self.max_rows = max_prompt_rows(num_tokens, vocab_size)
        self._rows = device().buffer(np.zeros(self.max_rows, np.int32))
        self._compute = self._eager(decoder, hidden) if is_eager else self._recorded(decoder, hidden)

    def __call__(self, rows: I32) -> F32 | RowsOnDevice:
        """Return f32[>= n, V] of the hidden rows i32[n]; the first n are theirs. On a device it has only started."""
        self._rows.array[: len(rows)] = rows
        self._rows.upload(0, len(rows))
        return self._compute(len(rows))

    def _eager(self, decoder: Decoder, hidden: Tensor) -> Callable[[int], F32 | RowsOnDevice]:
        def compute(num_rows: int) -> F32:
            logits: F32 = device().read(
                decoder.logits(gather_output_rows(hidden, device().wrap(self._rows.array[:num_rows])))
            )
            return logits

        return compute

    def _recorded(self, decoder: Decoder, hidden: Tensor) -> Callable[[int], F32 | RowsOnDevice]:
        recorder = Recorder()
        rows = recorder.add_input("hidden", hidden.dtype, tuple(hidden.shape))
        indices = recorder.add_input("rows", paddle.int32, (Size("num_rows"),))
        outputs = [decoder.logits(gather_output_rows(rows, indices))]  # type: ignore[arg-type]
        recording = Recording(recorder, outputs, {"num_rows": self.max_rows}, {"rows": 0})  # type: ignore[arg-type]
        program = device().program(recording, {"hidden": hidden, "rows": self._rows.of(self._rows.array)})
        [logits] = logit_rows(*program.outputs)

        def compute(num_rows: int) -> F32 | RowsOnDevice:
            program.run({"num_rows": num_rows})
            return logits

        return compute


@dataclass(frozen=True, slots=True, eq=False)
class PromptPiece:
    """Some rows of prompts: their tokens i32[n], and logits whose first n rows are the rows that the tokens follow."""

    token_ids: I32
    logits: F32 | RowsOnDevice


class PromptRows:
    """The rows of a step that a known prompt token follows, of requests that ask for its log-probability; and those of
    prompts whose embedding is asked for.

    `logits`, `hidden` [T, H] of the step: None = a model whose requests never ask.

    Attributes:
        watch: sees their logits, None = nothing does.
    """

    def __init__(
        self, logits: RowLogits | None, memory: StepMemory, table: RequestTable, hidden: Tensor | None = None
    ) -> None:
        self._logits, self._memory, self._table, self._hidden = logits, memory, table, hidden
        self.watch: WatchPrompts | None = None

    def counts(self) -> I32:
        """Return i32[R], how many there are of each request."""
        m, t = self._memory, self._table
        counts = np.zeros(m.num_requests, np.int32)
        table_rows = m.table_rows[: m.num_requests]
        for r in np.flatnonzero(t.num_prompt_logprobs.take(table_rows) >= 0).tolist():
            num_left = t.rules[table_rows.item(r)].num_prompt_tokens - 1 - m.num_computed.item(r)
            counts[r] = max(min(m.num_new.item(r), num_left), 0)
        return counts

    def pieces(self, counts: I32) -> Iterator[PromptPiece]:
        """Compute the logits of these rows, piece by piece; a piece holds until the next one."""
        m, tokens = self._memory, self._table.tokens
        asked = np.flatnonzero(counts)
        assert self._logits is not None, "log-probabilities of prompts need a model"
        lengths = counts[asked]
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = (np.repeat(m.query_start_loc[asked], lengths) + places).astype(np.int32)
        positions = np.repeat(m.num_computed[asked], lengths) + places + 1
        token_ids = tokens[np.repeat(m.table_rows[asked], lengths), positions]
        for begin in range(0, len(rows), self._logits.max_rows):
            piece = slice(begin, begin + self._logits.max_rows)
            yield PromptPiece(token_ids[piece], self._logits(rows[piece]))

    def logprobs(self) -> Mapping[int, LogprobArrays]:
        """Return them by row of the step, in the order of the tokens."""
        if not self._table.num_prompt_reports:
            return {}
        counts = self.counts()
        if not counts.any():
            return {}
        wanted = self._table.num_prompt_logprobs.take(self._memory.table_rows[: len(counts)])
        num_top, found = int(wanted[counts > 0].max()), list[LogprobArrays]()
        for piece in self.pieces(counts):
            if self.watch is not None:
                self.watch(piece.token_ids, piece.logits[: len(piece.token_ids)])
            found.append(_logprobs_of(piece, num_top))
        merged, ends = LogprobArrays.concat(found), np.cumsum(counts)
        return {r: merged.take(np.arange(ends[r] - counts[r], ends[r])) for r in np.flatnonzero(counts).tolist()}

    def embeddings(self) -> Mapping[int, F32]:
        """Return those of prompts that the step ends, f32[H] by row of the step."""
        m, t = self._memory, self._table
        if not t.pooled:
            return {}
        found: dict[int, F32] = {}
        for r, table_row in enumerate(m.table_rows[: m.num_requests].tolist()):
            pooled = t.pooled.get(table_row)
            begin, num_prompt_tokens = m.num_computed.item(r), t.rules[table_row].num_prompt_tokens
            if pooled is None or begin >= num_prompt_tokens:
                continue
            num_rows = min(m.num_new.item(r), num_prompt_tokens - begin)
            pooled.add(begin, self._hidden_rows(m.query_start_loc.item(r), num_rows))
            if begin + num_rows == num_prompt_tokens:
                found[r] = pooled.result()
        return found

    def _hidden_rows(self, begin: int, num_rows: int) -> F64:
        assert self._hidden is not None, "embeddings need a model"
        rows: F64 = widen(device().read(self._hidden)[begin : begin + num_rows]).astype(np.float64)
        return rows

    def follow(self) -> None:
        """Compute the logits as rank 0 does, on a rank that looks at none."""
        if not self._table.num_prompt_reports:
            return
        for _ in self.pieces(self.counts()):
            device().wait()  # the host writes the next rows where these are read


def _logprobs_of(piece: PromptPiece, num_top: int) -> LogprobArrays:
    rows: Rows = np.arange(len(piece.token_ids))
    return LogprobArrays(*token_logprobs(piece.logits, rows, piece.token_ids, min(num_top, int(piece.logits.shape[1]))))
