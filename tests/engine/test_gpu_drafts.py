"""Draft layers on a GPU: their passes are launched as graphs, with sizes rounded up, and no draft depends on that."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import Method, open_engine, run_alone, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import Logprobs
from fastdeploy_sd.device.program.program import Recording
from fastdeploy_sd.ops.logprob_rows import LogprobRows
from fastdeploy_sd.ops.reference import sampling as reference
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.model_based import recorded_passes as mtp_recorded
from fastdeploy_sd.types import I32, DraftTokens, Request, Rows, Speculation
from tests.engine.gpu import BATCH, model_with_layers, short_requests, tiny_config
from tests.engine.test_failing_rows import runner_of
from tests.engine.test_gpu import in_order

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chip")]


@dataclass
class Drafts:
    """What draft layers said in each step, and how often graphs were launched besides those of the target."""

    steps: list[tuple[Sequence[str], list[int], list[int]]] = field(default_factory=list)
    num_graph_launches: int = 0
    num_logprobs: int = 0

    def add(self, request_ids: Sequence[str], drafts: DraftTokens) -> None:
        self.steps.append((request_ids, drafts.token_ids.tolist(), drafts.cu_num_draft.tolist()))


def drafts_of(path: pathlib.Path, method: Method, requests: Sequence[Request], patch: pytest.MonkeyPatch) -> Drafts:
    found, call, find_logprobs, is_drafting = Drafts(), CudaLibrary.call, LogprobRows.__call__, False

    def noted(self: CudaLibrary, name: str, *arguments: object) -> None:
        found.num_graph_launches += is_drafting and name == "graph_launch"
        assert name != "copy", "rows come back"
        call(self, name, *arguments)

    def verified(self: LogprobRows, logits: Any, rows: Rows, token_ids: I32, num_top: int) -> Logprobs:
        got = find_logprobs(self, logits, rows, token_ids, num_top)
        with patch.context() as context:
            context.setattr(CudaLibrary, "call", call)
            want = reference.token_logprobs(device().read(logits), rows, token_ids, num_top)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1.2e-7, atol=3e-7)
        found.num_logprobs += len(rows)
        return got

    with patch.context() as context, open_engine(in_order(tiny_config(path)), BATCH, method) as engine:
        context.setattr(CudaLibrary, "call", noted)
        context.setattr(LogprobRows, "__call__", verified)
        runner = runner_of(engine)
        propose = runner._drafting._propose

        def propose_noted(request_ids: tuple[str, ...]) -> DraftTokens:
            nonlocal is_drafting
            is_drafting = True
            drafts = propose(request_ids)
            is_drafting = False
            found.add(request_ids, drafts)
            return drafts

        context.setattr(runner._drafting, "_propose", propose_noted)
        run(engine, requests)
    return found


@pytest.mark.parametrize(("model", "num_layers", "num_logprobs"), [("ernie4_5-tiny", 1, 3), ("qwen3-tiny", 3, None)])
def test_a_draft_does_not_depend_on_how_its_passes_are_launched(
    model: str,
    num_layers: int,
    num_logprobs: int | None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes that come again after others had the same graph's place in the arena find nothing of these.

    Log-probabilities of both are found on the device, under the logits that are there then.
    """
    path = model_with_layers(tmp_path, model, num_layers)
    [method] = standard_methods(["mtp"], [3])
    method = replace(method, speculative=replace(method.speculative, enable_draft_logprob=num_logprobs is not None))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=num_logprobs)
    lengths = (3, 2)
    requests = [
        Request(
            f"{i}",
            request.prompt_token_ids[:length],
            sampling,
            max_tokens=12 + i,
            seed=0,
            speculation=Speculation(num_draft_logprobs=num_logprobs),
        )
        for i, (request, length) in enumerate(zip(short_requests(), lengths, strict=False))
    ]
    graphs = drafts_of(path, method, requests, monkeypatch)
    assert graphs.num_graph_launches > 0

    class Unpadded(Recording):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments[:3])  # type: ignore[arg-type]

    monkeypatch.setattr(mtp_recorded, "Recording", Unpadded)
    plain = drafts_of(path, method, requests, monkeypatch)
    assert plain.num_graph_launches == 0
    assert graphs.steps == plain.steps
    num_drafts = sum(len(token_ids) for _, token_ids, _ in plain.steps)
    assert num_drafts > 10
    # The outputs' too; of drafts that were cut off as well.
    assert plain.num_logprobs == graphs.num_logprobs >= (0 if num_logprobs is None else num_drafts + 12 + 13)


def test_the_next_best_tokens_of_a_pass_are_drafted_too(tmp_path: pathlib.Path) -> None:
    """They are found on the device; outputs are those without drafts."""
    config = tiny_config(model_with_layers(tmp_path))
    requests = [replace(r, max_tokens=16) for r in short_requests()[:3]]
    answers, num_drafts = run_alone(config, requests), []
    for draft_trees in (False, True):
        method = Method("mtp", SpeculativeConfig("mtp", 6, num_model_steps=2, draft_trees=draft_trees, draft_top_k=16))
        cell = run_cell(config, BATCH, method, requests, answers)
        assert (cell.difference, cell.missing) == (None, None)
        num_drafts.append(cell.num_drafts)
    assert num_drafts[1] > num_drafts[0] > 0
