"""OpenVINO GenAI: its continuous batching pipeline for decoding, the compiled model itself for forward passes.

The pipeline takes no rows apart from a request's next one, so `forward` runs the stateful model that the pipeline is
made of. Its state only grows: the context becomes longer by the rows that were run.
"""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import Peer, Settings, TimedCalls, TokenIds, serve

_KV_CACHE_GB = 2
_MAX_BATCHED_TOKENS = 8192
_PROPERTIES = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


class Openvino(Peer):
    """One converted model; each way to run it is made when first needed, as it holds the weights once more."""

    def __init__(self) -> None:
        self._model = ""
        self._threads = 0
        self._max_seqs = 0
        self._max_len = 0
        self._pipeline: Any = None
        self._drafting: Any = None
        self._request: Any = None
        self._handles: list[Any] = []
        self._ids = count()
        self._position = 0

    def load(self, model: str, fmt: str, settings: Settings) -> dict[str, Any]:
        del fmt
        self._model, self._threads = model, settings["threads"]
        self._max_seqs, self._max_len = settings["max_seqs"], settings["max_len"]
        compiled = self._compile()
        properties = {name: _text(compiled.get_property(name)) for name in _PROPERTIES}
        return {
            "versions": {"openvino-genai": genai.__version__},
            "kv_type": properties["KV_CACHE_PRECISION"],
            "notes": ", ".join(f"{name} {value}" for name, value in properties.items()),
        }

    def prefill(self, prompt: TokenIds) -> dict[str, Any]:
        self._add([prompt], max_tokens=1)
        calls = TimedCalls()
        while self._pipeline.has_non_finished_requests():
            calls.run(self._pipeline.step)
        tokens = self._read()
        self._handles = []
        return {"seconds": sum(calls.seconds), "tokens": [ids[-1] for ids in tokens]}

    def start(self, prompts: list[TokenIds]) -> dict[str, Any]:
        self._add(prompts, max_tokens=self._max_len - len(prompts[0]))
        first: list[TokenIds] = [[] for _ in prompts]
        while not all(first):
            self._pipeline.step()
            first = [old + new for old, new in zip(first, self._read(), strict=True)]
        # A prompt of an early step may have decoded while later ones were computed.
        return {"tokens": [ids[0] for ids in first]}

    def decode(self, steps: int) -> dict[str, Any]:
        calls = TimedCalls()
        tokens = []
        for _ in range(steps):
            calls.run(self._pipeline.step)
            tokens.append([ids[-1] for ids in self._read()])
        return {"seconds": calls.seconds, "tokens": tokens}

    def stop(self) -> dict[str, Any]:
        for handle in self._handles:
            handle.stop()
        self._handles = []
        while self._pipeline is not None and self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {}

    def context(self, prompt: TokenIds) -> dict[str, Any]:
        if self._request is None:
            self._request = self._compile().create_infer_request()
        self._request.reset_state()
        self._position = 0
        self._run(prompt)
        return {}

    def forward(self, rows: int, repeats: int) -> dict[str, Any]:
        calls = TimedCalls()
        for _ in range(repeats):
            calls.run(lambda: self._run([1] * rows))
        return {"seconds": calls.seconds}

    def generate(self, prompt: TokenIds, max_tokens: int, option: dict[str, Any]) -> dict[str, Any]:
        """Options are its generation config's for prompt lookup."""
        if self._drafting is None:
            properties = {"INFERENCE_NUM_THREADS": self._threads, "prompt_lookup": True}
            self._drafting = genai.LLMPipeline(self._model, "CPU", scheduler_config=self._scheduler(), **properties)
        config = _greedy(max_tokens)
        for name, value in option.items():
            setattr(config, name, value)
        shape = (1, len(prompt))
        inputs = genai.TokenizedInputs(ov.Tensor(np.array([prompt], np.int64)), ov.Tensor(np.ones(shape, np.int64)))
        begin = time.perf_counter()
        result = self._drafting.generate(inputs, config)
        seconds = time.perf_counter() - begin
        return {"tokens": list(result.tokens[0]), "seconds": seconds}

    def _scheduler(self) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _KV_CACHE_GB
        scheduler.max_num_seqs = self._max_seqs
        scheduler.max_num_batched_tokens = _MAX_BATCHED_TOKENS
        scheduler.enable_prefix_caching = False
        return scheduler

    def _compile(self) -> Any:
        path = str(Path(self._model) / "openvino_model.xml")
        properties = {"INFERENCE_NUM_THREADS": self._threads, "PERFORMANCE_HINT": "LATENCY"}
        return ov.Core().compile_model(path, "CPU", properties)

    def _add(self, prompts: list[TokenIds], max_tokens: int) -> None:
        if self._pipeline is None:
            properties = {"INFERENCE_NUM_THREADS": self._threads}
            self._pipeline = genai.ContinuousBatchingPipeline(self._model, self._scheduler(), "CPU", properties, {}, {})
        for prompt in prompts:
            ids = ov.Tensor(np.array([prompt], np.int64))
            self._handles.append(self._pipeline.add_request(next(self._ids), ids, _greedy(max_tokens)))

    def _read(self) -> list[TokenIds]:
        """New tokens of every started request, [] where there are none."""
        tokens = []
        for handle in self._handles:
            new: TokenIds = []
            while handle.can_read():
                for output in handle.read().values():
                    new.extend(output.generated_ids)
            tokens.append(new)
        return tokens

    def _run(self, ids: TokenIds) -> None:
        num_tokens = len(ids)
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, self._position + num_tokens), np.int64),
            "position_ids": np.arange(self._position, self._position + num_tokens, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.start_async(inputs, share_inputs=True)
        self._request.wait()
        self._position += num_tokens


def _greedy(max_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _text(value: object) -> str:
    """A property's value; element types print as <Type: 'bfloat16'>."""
    return str(value).removeprefix("<Type: '").removesuffix("'>")


if __name__ == "__main__":
    serve(Openvino())
