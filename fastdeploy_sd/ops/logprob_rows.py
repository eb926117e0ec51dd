"""Logits as the host looks at them. Log-probabilities under those on a device are found there, and come back alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.device.device import Device, device
from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.device_tensor import DeviceTensor
from fastdeploy_sd.ops.sampling import TOKEN_LOGPROBS
from fastdeploy_sd.rules.sampling import MAX_LOGPROBS
from fastdeploy_sd.types import F32, I32, Rows


def logit_rows(*logits: Any) -> Sequence[F32 | RowsOnDevice]:
    """Return what the host takes for logits, f32[L, V] each, of one width: its own memory, or rows on the device.

    Raises MemoryError: the device has none for the log-probabilities of L rows.
    """
    if device().kind == "cpu":
        return [device().read(rows) for rows in logits]
    if not logits:
        return []
    find = LogprobRows(device(), max(logits, key=lambda rows: rows.shape[0]))
    return [RowsOnDevice(rows, device().read, find) for rows in logits]


class LogprobRows:
    """Memory for the answers, and a call of `token_logprobs` that is bound to it, for logits of at most as many rows.

    Raises MemoryError: the device has none for as much as so many rows may ask for.
    """

    def __init__(self, device: Device, logits: DeviceTensor) -> None:
        num_rows, vocab_size = logits.shape
        self._device, self._num_rows, self._num_top = device, num_rows, min(MAX_LOGPROBS, vocab_size)
        num_listed = num_rows * self._num_top
        # Rows, then tokens; a call has as many as it asks for, one after the other.
        self._asked = device.buffer(np.zeros(2 * num_rows, np.int32))
        # Log-probabilities, ranks, then the listed tokens and theirs; as floats where they are.
        self._found = device.buffer(np.zeros(2 * (num_rows + num_listed), np.int32))
        asked, found = self._asked, self._found
        listed = found.array[2 * num_rows :].reshape(2, num_rows, self._num_top)
        self._call = device.bind(
            TOKEN_LOGPROBS,
            logits=logits,
            rows=asked.of(asked.array[:num_rows]),
            token_ids=asked.of(asked.array[num_rows:]),
            num_top=self._num_top,
            logprobs=found.of(found.array[:num_rows].view(np.float32)),
            ranks=found.of(found.array[num_rows : 2 * num_rows]),
            top_token_ids=found.of(listed[0]),
            top_logprobs=found.of(listed[1].view(np.float32)),
        )
        self._begin_asked, self._begin_found = self._call.params.rows, self._call.params.logprobs
        found.download()  # which takes the pinned memory for it, now and not in a step
        device.wait()

    def __call__(self, logits: DeviceTensor, rows: Rows, token_ids: I32, num_top: int) -> tuple[F32, I32, I32, F32]:
        """Wait for the calls so far and this one; see `reference.sampling.token_logprobs`.

        Raises ValueError: more rows or alternatives than there is room for.
        """
        n = len(rows)
        if n > self._num_rows or num_top > self._num_top or len(token_ids) != n:
            raise ValueError(
                f"rows: expected at most {self._num_rows}, with a token and at most {self._num_top} alternatives each,"
                f" got {n} with {len(token_ids)} and {num_top}"
            )
        self._asked.array[:n], self._asked.array[n : 2 * n] = rows, token_ids
        self._asked.upload(0, 2 * n)
        params, word = self._call.params, 4
        params.logits, params.num_logits = logits.address, logits.shape[0]
        params.num_rows, params.num_top = n, num_top
        params.token_ids = self._begin_asked + word * n
        params.ranks = self._begin_found + word * n
        params.top_token_ids = self._begin_found + word * 2 * n
        params.top_logprobs = self._begin_found + word * n * (2 + num_top)
        self._call.run()
        self._found.download(0, n * (2 + 2 * num_top))
        self._device.wait()
        found: I32 = np.array(self._found.array[: n * (2 + 2 * num_top)], np.int32)
        listed = found[2 * n :].reshape(2, n, num_top)
        return found[:n].view(np.float32), found[n : 2 * n], listed[0], listed[1].view(np.float32)
