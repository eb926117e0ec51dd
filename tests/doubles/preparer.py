"""A preparer that starts no processes, for tests of what comes before and after it."""

from __future__ import annotations

from fastdeploy_sd.entrypoints.openai.preparation import Outcome
from fastdeploy_sd.entrypoints.openai.preparer import Preparer


class LocalPreparer(Preparer):
    """Does the work of its workers in the task that asks."""

    async def _run_in_worker(self, task: str, content: bytes) -> Outcome:
        return self._local.run(task, content)
