"""An engine over the toy model that shows its plans and outputs step by step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.spec_decode.proposer import Proposer
from fastdeploy_sd.types import Request, RequestId, RequestOutput, SchedulerOutput
from tests.doubles.engines import Transcript, run_to_end, toy_config, toy_info
from tests.doubles.proposers import OracleProposer
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel

VOCAB = 97


class Bench:
    """An engine and what went through it.

    Attributes:
        plans: of all steps so far. outputs: of the last step.
    """

    def __init__(
        self, *, proposer: Proposer | None = None, info: dict[str, Any] | None = None, **config: object
    ) -> None:
        """Make an idle engine; `info` are arguments of `toy_info`, `config` of `toy_config`."""
        self.plans: list[SchedulerOutput] = []
        self.outputs: dict[RequestId, RequestOutput] = {}
        self.info = toy_info(vocab_size=VOCAB, **(info or {}))
        self.executor = ToyExecutor(self.info, proposer, before_step=self.plans.append)
        self.engine = Engine(toy_config(**config), self.executor)  # type: ignore[arg-type]
        self.transcript = Transcript()

    def submit(self, *requests: Request) -> None:
        """Queue requests."""
        for request in requests:
            self.engine.submit(request)

    def step(self) -> dict[str, int]:
        """One step; tokens run per request, in the plan's order."""
        num_plans = len(self.plans)
        outputs = self.engine.step()
        self.outputs = {output.request_id: output for output in outputs}
        self.transcript.add(outputs)
        self.engine.check_integrity()
        if len(self.plans) == num_plans:
            return {}
        return dict(zip(self.plans[-1].request_ids, self.plans[-1].num_new_tokens.tolist(), strict=True))

    def num_blocks(self) -> dict[str, int]:
        """Blocks the executor has been told of, per request that is still known to it."""
        count: dict[str, int] = {}
        for plan in self.plans:
            for request_id in (*plan.finished_ids, *plan.preempted_ids):
                del count[request_id]
            count |= {new.request.request_id: len(new.block_ids) for new in plan.new}
            for delta in plan.deltas:
                count[delta.request_id] += len(delta.new_block_ids)
        return count

    def finish(self) -> Transcript:
        """Step to the end; returns all outputs."""
        return run_to_end(self.engine, self.transcript, max_steps=500)


def continuations(model: ToyModel, requests: Iterable[Request]) -> dict[RequestId, list[int]]:
    """What the model says to each request, further than its max_tokens; for the proposers of `proposers.py`."""
    known = {}
    for request in requests:
        tail = islice(model.endless(request), request.max_tokens + 20)
        known[request.request_id] = [*request.prompt_token_ids.tolist(), *tail]
    return known


def oracle(requests: Iterable[Request]) -> OracleProposer:
    """A proposer that is always right about these requests."""
    return OracleProposer(continuations(ToyModel(VOCAB), requests), VOCAB)
