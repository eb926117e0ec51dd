"""A process of `bench compare`: one build of the program, which times whole steps when it is told to.

It runs this file with the modules of the build's own checkout, so it imports only what older ones have too. Its first
argument is JSON: engine (its options), context_len, prompt_len, max_rows, max_tokens, is_cpu_time. An order is a line
of JSON on standard input, `{"prompt": 512}` or `{"rows": 4}`, and its answer a line on standard output, `{"ms": 12.3}`.
Ends when its input does.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.engines import greedy_request, running_engine
from benchmarks.step_cost import FixedDrafts, verify_rows
from fastdeploy_sd.config import Config, SpeculativeConfig, load_config
from fastdeploy_sd.engine.engine import Engine

# The first of a turn finds the caches full of the other build's memory and is not counted.
STEPS_PER_TURN = 4


def configured(options: dict[str, Any]) -> Config:
    """Return a configuration with room for one request, its drafts, and a whole prompt in one step."""
    config = load_config(options["engine"], "python -m benchmarks compare")
    drafts = max(options["max_rows"] - 1, 1)
    length = options["context_len"] + options["max_tokens"]
    batched = max(options["prompt_len"], options["context_len"], options["max_rows"])
    return replace(
        config,
        model=replace(config.model, max_model_len=max(length, options["prompt_len"] + 1)),
        scheduler=replace(config.scheduler, max_num_seqs=1, max_num_batched_tokens=batched),
        speculative=SpeculativeConfig("ngram", drafts),
    )


class Steps:
    """Prompts of their own, then one request whose steps are over as many rows as is asked for."""

    def __init__(self, engine: Engine, drafts: FixedDrafts, options: dict[str, Any]) -> None:
        self._engine, self._drafts, self._options = engine, drafts, options
        self._rng = np.random.default_rng(0)
        self._num_prompts = 0
        self._is_decoding = False
        self._clock = time.process_time if options["is_cpu_time"] else time.perf_counter

    def prompt(self, length: int) -> float:
        """Return the milliseconds of a prompt's step; before the first call of `rows`."""
        self._num_prompts += 1
        self._submit(f"prompt-{self._num_prompts}", length, 1)
        begin = self._clock()
        while not self._engine.step():
            pass
        return (self._clock() - begin) * 1e3

    def rows(self, num_rows: int) -> float:
        """Return the milliseconds of the fastest step over so many rows."""
        if not self._is_decoding:
            self._is_decoding = True
            self._submit("context", self._options["context_len"], self._options["max_tokens"])
            while not self._engine.step():
                pass
        self._drafts.num_drafts = num_rows - 1
        self._engine.step()
        return min(self._step(num_rows) for _ in range(STEPS_PER_TURN - 1))

    def _step(self, num_rows: int) -> float:
        before = self._engine.stats()
        begin = self._clock()
        outputs = self._engine.step()
        taken = (self._clock() - begin) * 1e3
        verify_rows(num_rows, (before, self._engine.stats()), outputs)
        return taken

    def _submit(self, name: str, length: int, max_tokens: int) -> None:
        tokens = self._rng.integers(1, self._engine.model_info.vocab_size, length, np.int32)
        self._engine.submit(greedy_request(name, tokens, max_tokens))


def main() -> None:
    """Load the model, say so with an empty line, and follow orders."""
    options = json.loads(sys.argv[1])
    config, drafts = configured(options), FixedDrafts()
    with running_engine(config, lambda *_: drafts) as engine:
        steps = Steps(engine, drafts, options)
        print(flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            ms = steps.prompt(order["prompt"]) if "prompt" in order else steps.rows(order["rows"])
            print(json.dumps({"ms": ms}), flush=True)


if __name__ == "__main__":
    main()
