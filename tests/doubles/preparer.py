"""A preparer that starts no processes, for tests of what comes before and after it."""

from __future__ import annotations

from functools import cached_property

from fastdeploy_sd.entrypoints.openai.preparation import Given, Outcome, Preparation
from fastdeploy_sd.entrypoints.openai.preparer import Preparer
from fastdeploy_sd.text.guidance.checker import GrammarChecker


class LocalPreparer(Preparer):
    """Does the work of its workers in the task that asks."""

    local_cpu_s = 60.0  # garbage collections of a long test run take longer than a small body may

    async def _run_in_worker(self, task: str, given: Given) -> Outcome:
        return self._worker.run(task, given)

    @cached_property
    def _worker(self) -> Preparation:
        verify = GrammarChecker.of(self.tokenizer).verify
        return Preparation(self._encoder, self._config, self._model_info(), verify_grammar=verify)
