"""llama.cpp through its C API: the Python binding over the library that setup built for this processor.

Tokens are chosen by NumPy's argmax over the logits, which is faster than the library's own greedy sampler.
"""

from __future__ import annotations

from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np
import numpy.typing as npt

from benchmarks.peers.protocol import Peer, Settings, TimedCalls, TokenIds, serve

_MAX_BATCH = 2048
_MAX_UBATCH = 512
# Positions after the prompt that a context has room for.
_ROOM = 256


class Llamacpp(Peer):
    """One GGUF file; a context is made anew for every number of sequences, as its memory is divided between them."""

    def __init__(self) -> None:
        self._model: Any = None
        self._context: Any = None
        self._threads = 0
        self._vocab_size = 0
        self._last: list[int] = []
        self._position = 0

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        del fmt
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"model: expected a GGUF file, got {model}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._threads = settings["threads"]
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "kv_type": "f16",
            "notes": llama.llama_print_system_info().decode(),
        }

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        self._new_context(1, len(prompt))
        calls = TimedCalls()
        calls.run(lambda: self._prompt(0, prompt))
        return {"seconds": calls.seconds[0], "tokens": list(self._last)}

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        self._new_context(len(prompts), len(prompts[0]))
        for sequence, prompt in enumerate(prompts):
            self._prompt(sequence, prompt)
        return {"tokens": list(self._last)}

    def decode(self, steps: int) -> dict[str, Any]:
        calls = TimedCalls()
        tokens = [list(calls.run(self._step)) for _ in range(steps)]
        return {"seconds": calls.seconds, "tokens": tokens}

    def stop(self) -> dict[str, Any]:
        self._free_context()
        return {}

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        self._new_context(1, len(prompt))
        self._prompt(0, prompt)
        return {}

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        """The rows leave the cache again, so that the context stays as long as it was."""
        calls = TimedCalls()
        places = [(self._last[0], self._position + row, 0) for row in range(rows)]
        for _ in range(repeats):
            calls.run(lambda: self._run(places, num_logits=rows))
            llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), 0, self._position, -1)
        return {"seconds": calls.seconds}

    def _new_context(self, num_sequences: int, prompt_len: int) -> None:
        self._free_context()
        params = llama.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * (prompt_len + _ROOM)
        params.n_batch, params.n_ubatch = _MAX_BATCH, _MAX_UBATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False  # what llama-batched-bench does: every sequence reads its own keys only
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"context: llama.cpp has no room for {params.n_ctx} tokens")
        self._last = []

    def _free_context(self) -> None:
        if self._context:
            llama.llama_free(self._context)
            self._context = None

    def _prompt(self, sequence: int, prompt: TokenIds) -> None:
        places = [(token, position, sequence) for position, token in enumerate(prompt)]
        for begin in range(0, len(places), _MAX_BATCH):
            logits = self._run(places[begin : begin + _MAX_BATCH], num_logits=1)
        self._last.append(int(logits[0].argmax()))
        self._position = len(prompt)

    def _step(self) -> list[int]:
        places = [(token, self._position, sequence) for sequence, token in enumerate(self._last)]
        self._last = self._run(places, num_logits=len(places)).argmax(axis=1).tolist()
        self._position += 1
        return self._last

    def _run(self, places: list[tuple[int, int, int]], num_logits: int) -> npt.NDArray[np.float32]:
        """Run (token, position, sequence) triples; the logits of the last ones, f32[num_logits, vocabulary]."""
        batch = llama.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for i, (token, position, sequence) in enumerate(places):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(places) - num_logits
        status = llama.llama_decode(self._context, batch)
        llama.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: expected 0, got {status}")
        logits = llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (num_logits, self._vocab_size))


if __name__ == "__main__":
    serve(Llamacpp())
