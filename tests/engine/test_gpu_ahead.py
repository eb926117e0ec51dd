"""Drafts that are made and verified before the host knows the tokens they follow, on a GPU.

The checkpoints' draft layers are random, so the tests write guesses of their own where the device keeps drafts: right
ones up to some place. A guess may be anything, so no answer may change.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, Method, open_engine, standard_methods
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.device.device import device
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason, Request, RequestId, SchedulerOutput
from fastdeploy_sd.worker.step.batch import PendingRows
from fastdeploy_sd.worker.step.step_launcher import StepLauncher
from tests.doubles.engines import Transcript, run_to_end
from tests.engine.gpu import BATCH, TIGHT, gpu_device, model_with_layers, note_drafts, short_requests, tiny_config
from tests.engine.test_failing_rows import runner_of
from tests.engine.test_gpu import FailingOnce, in_order, is_plain
from tests.models.eagle_heads import HEADS, EagleHead

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_chip")]

NUM_DRAFTS = 3
[MTP] = standard_methods(["mtp"], [NUM_DRAFTS])


def plain_requests(count: int) -> list[Request]:
    """Greedy and seeded ones, with penalties or without, of short prompts."""
    found = [r for r in short_requests() if is_plain(r)][:count]
    return [
        replace(r, prompt_token_ids=r.prompt_token_ids[-6 - i :].copy(), max_tokens=9 + i) for i, r in enumerate(found)
    ]


@functools.cache
def plain_answers(kind: str) -> Mapping[RequestId, tuple[int, ...]]:
    """What steps in order without drafts give them, on such a GPU."""
    with gpu_device(kind), open_engine(in_order(tiny_config()), BATCH, PLAIN) as engine:
        return {name: answer.token_ids for name, answer in run(engine, plain_requests(4)).items()}


def texts_of(
    requests: Sequence[Request], answers: Mapping[RequestId, tuple[int, ...]]
) -> Mapping[RequestId, Sequence[int]]:
    """Prompt and answer of each."""
    return {r.request_id: [*r.prompt_token_ids.tolist(), *answers[r.request_id]] for r in requests}


class Guesses:
    """Replaces what the device has drafted after an open step, and remembers what that was.

    Args:
        texts: prompt and answer of every request; empty = nothing is replaced.

    Attributes:
        made: by request and committed tokens, the drafts there was room for. num_ahead: steps that were
            launched after one that was not over.
    """

    def __init__(self, engine: Engine, texts: Mapping[RequestId, Sequence[int]], patch: pytest.MonkeyPatch) -> None:
        runner = runner_of(engine)
        self._texts, self._table, self._rng = texts, runner._table, np.random.default_rng(3)
        drafter, append = runner._drafting._async._drafter, runner._batches._append_there
        calls: Any = drafter, append
        self._made_drafts, self._num_tokens = calls[0]._hold._arrays["made_drafts"], calls[1]._arrays["num_tokens"]
        self._start = runner._drafting._async.start
        self.made: dict[tuple[RequestId, int], list[int]] = {}
        self.num_ahead = 0
        patch.setattr(runner._drafting._async, "start", self)
        start = StepLauncher._start

        def counted(launcher: StepLauncher, plan: SchedulerOutput, *, is_open: bool) -> bool:
            is_second = bool(launcher._in_flight)
            may_follow = start(launcher, plan, is_open=is_open)
            self.num_ahead += is_second and launcher._in_flight[-1].launched is not None
            return may_follow

        patch.setattr(StepLauncher, "_start", counted)

    def __call__(self, rows: PendingRows) -> None:
        self._start(rows)
        num_tokens, drafts = device().read(self._num_tokens), device().read(self._made_drafts)
        names = {row: name for name, row in self._table._table_row_of.items()}
        for r in np.flatnonzero(rows.max_output).tolist():
            row = rows.table_rows.item(r)
            known = num_tokens.item(row)
            room = min(self._table.max_total.item(row) - known - 1, rows.num_kv_slots.item(r) - known + 1)
            count = min(rows.planned_drafts.item(r), room)
            if count > 0:
                self.made[names[row], known] = drafts[row, :count].tolist()
            if self._texts:
                right = self._texts[names[row]][known : known + NUM_DRAFTS]
                drafts[row, : len(right)] = right
                drafts[row, self._rng.integers(0, NUM_DRAFTS + 1) :] = 7
        device().write(self._made_drafts, drafts)


@pytest.mark.parametrize("way", [BATCH, TIGHT], ids=lambda way: way.name)
def test_any_number_of_right_drafts_gives_the_plain_tokens(
    kind: str, way: EngineVariant, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are computed with them, some in parts; requests end inside drafts, by length, or as a client goes."""
    requests, want = plain_requests(4), dict(plain_answers(kind))
    texts = texts_of(requests, want)
    ended = requests[1].request_id
    stop = want[ended][5]
    requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, stop_token_ids=(stop,)))
    want[ended] = want[ended][: want[ended].index(stop) + 1]
    with open_engine(tiny_config(model_with_layers(tmp_path)), way, MTP) as engine:
        guesses, transcript = Guesses(engine, texts, monkeypatch), Transcript()
        for request in requests[:3]:
            engine.submit(request)
        for _ in range(4):
            transcript.add(engine.step())
        engine.submit(requests[3])
        aborted = requests[0].request_id
        transcript.add(engine.abort([aborted]))
        run_to_end(engine, transcript)
        engine.check_integrity()
        stats = engine.stats()
    assert transcript.last[aborted].finish_reason is FinishReason.ABORT
    for name, token_ids in want.items():
        got = tuple(transcript.token_ids[name])
        assert got == (token_ids[: len(got)] if name == aborted else token_ids)
    assert guesses.num_ahead >= 3
    assert 3 <= stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("num_layers", [1, 3, None], ids=["1 layer", "3 layers", "P-EAGLE"])
def test_drafts_are_those_that_the_host_would_have_had_made(
    num_layers: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every token of a text, also where several came at once: the layers' KV is the same."""
    path, method = model_with_layers(tmp_path, num_layers=num_layers or 1), MTP
    if num_layers is None:
        head = EagleHead(tmp_path / "head", HEADS["p-eagle of speculators"], str(path))
        method = Method(
            "P-EAGLE", SpeculativeConfig("eagle3", NUM_DRAFTS, num_model_steps=NUM_DRAFTS, model=str(head.path))
        )
    requests = plain_requests(2 if num_layers else 4)
    requests = [replace(r, sampling=SamplingParams(temperature=0.0, ignore_eos=True)) for r in requests]
    with open_engine(in_order(tiny_config(path)), BATCH, method) as engine:
        in_turn = note_drafts(runner_of(engine), monkeypatch)
        want = {name: answer.token_ids for name, answer in run(engine, requests).items()}
    with open_engine(tiny_config(path), BATCH, method) as engine:
        guesses = Guesses(engine, texts_of(requests, want), monkeypatch)
        assert {name: answer.token_ids for name, answer in run(engine, requests).items()} == want
        assert engine.stats().num_accepted_tokens > 0
    compared = [(drafts, in_turn[at][: len(drafts)]) for at, drafts in guesses.made.items() if in_turn.get(at)]
    assert len(compared) >= 5
    for got, expected in compared:
        assert got[: len(expected)] == expected


@pytest.mark.usefixtures("expects_step_failures")
def test_a_step_whose_drafts_the_device_alone_has_runs_again(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the one after it, which counted on tokens that did not come. Where only drafts are lost, none does."""
    requests = plain_requests(2)
    want = {r.request_id: plain_answers(kind)[r.request_id] for r in requests}
    with open_engine(tiny_config(model_with_layers(tmp_path)), BATCH, MTP) as engine:
        guesses = Guesses(engine, texts_of(requests, want), monkeypatch)
        runner = runner_of(engine)
        phases = ((runner._batches, "commit_pending", False), (runner._drafting._async, "start", True))
        for owner, phase, is_done in phases:
            with pytest.MonkeyPatch.context() as patch:
                failing = FailingOnce(getattr(owner, phase), is_done=is_done)
                patch.setattr(owner, phase, failing)
                assert {name: answer.token_ids for name, answer in run(engine, requests).items()} == want
                assert failing.num_calls > 1
        caplog.clear()
        num_ahead, drafter = guesses.num_ahead, runner._drafting._async._drafter
        assert drafter is not None
        failing = FailingOnce(drafter.finish, is_done=False)
        monkeypatch.setattr(drafter, "finish", failing)
        assert {name: answer.token_ids for name, answer in run(engine, requests).items()} == want
        assert guesses.num_ahead - num_ahead >= failing.num_calls - 2 >= 3
        assert "goes on without drafts" in caplog.text
        assert "could not be started" not in caplog.text
