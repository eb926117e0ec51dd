"""Runs windows of a text through loaded models, one after the other, and compares what these say of each token.

The reference's distributions over the vocabulary are kept in a file for one window at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.cli.perplexity.statistics import kl_divergence, log_softmax
from fastdeploy_sd.config import Config
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import WatchPrompts
from fastdeploy_sd.errors import ERROR_TYPES, InternalError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import F32, F64, I32, Request

TakeRows = Callable[[slice, F32], None]
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


class ScoredModel:
    """A loaded model that says how probable the tokens of a prompt are.

    Raises CheckpointError, ConfigError: it cannot be loaded.
    """

    def __init__(self, config: Config) -> None:
        self._executor = create_executor(config)
        self._engine = Engine(config, self._executor)
        self.info = self._engine.model_info
        self._num_requests = 0

    def score(self, token_ids: I32, num_scored: int, watch: WatchPrompts | None = None) -> F64:
        """Return nats f64[num_scored] of the last tokens of a prompt: minus their log-probabilities.

        `watch` sees all of its tokens but the first, and their logits, in order. Raises FdsdError: it could not run.
        """
        self._num_requests += 1
        request = Request(f"window-{self._num_requests}", token_ids, _SAMPLING, max_tokens=1, seed=0)
        self._executor.watch_prompts(watch)
        self._engine.submit(request)
        outputs = []
        while self._engine.has_work():
            outputs += self._engine.step()
        [output] = outputs
        if output.prompt_logprobs is None:
            kind, text = output.error or (InternalError.__name__, "no log-probabilities of the prompt came")
            raise ERROR_TYPES.get(kind, InternalError)(text)
        return -output.prompt_logprobs.logprobs[-num_scored:].astype(np.float64)

    def close(self) -> None:
        """Free the model."""
        self._executor.shutdown()


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What a model and the reference say of n scored tokens.

    Attributes:
        nats, reference_nats: f64[n], minus the log-probability of each.
        divergence: f64[n], KL(reference || model) of the distributions there, in nats.
        same_top: bool[n], whether the most likely token is the same.
    """

    nats: F64
    reference_nats: F64
    divergence: F64
    same_top: npt.NDArray[np.bool_]


class Comparer:
    """Compares two models window by window; `max_scored`: tokens that a window scores at most."""

    def __init__(self, model: ScoredModel, reference: ScoredModel, max_scored: int) -> None:
        self._model, self._reference = model, reference
        shape = max_scored, reference.info.vocab_size
        with tempfile.TemporaryFile() as file:  # it stays as long as it is mapped
            self._kept: F32 = np.memmap(file, np.float32, "w+", shape=shape)

    def compare(self, token_ids: I32, num_scored: int) -> Comparison:
        """Score the last tokens of a prompt under both. Raises FdsdError: a model could not run."""
        skipped = len(token_ids) - 1 - num_scored
        divergence, same_top = np.zeros(num_scored), np.zeros(num_scored, np.bool_)

        def keep(rows: slice, logprobs: F32) -> None:
            self._kept[rows] = logprobs

        def compare(rows: slice, logprobs: F32) -> None:
            reference = self._kept[rows]
            divergence[rows] = kl_divergence(reference, logprobs)
            same_top[rows] = reference.argmax(axis=1) == logprobs.argmax(axis=1)

        reference_nats = self._reference.score(token_ids, num_scored, _Scored(skipped, keep))
        nats = self._model.score(token_ids, num_scored, _Scored(skipped, compare))
        return Comparison(nats, reference_nats, divergence, same_top)


class _Scored:
    """Passes the log-probabilities of scored tokens on, with their places among these."""

    def __init__(self, num_skipped: int, take: TakeRows) -> None:
        self._next, self._take = -num_skipped, take

    def __call__(self, token_ids: I32, logits: F32) -> None:
        begin, self._next = self._next, self._next + len(token_ids)
        if self._next > 0:
            self._take(slice(max(begin, 0), self._next), log_softmax(logits[max(-begin, 0) :]))
