"""A request whose mask is computed off the steps is in none of them meanwhile, and gets the same tokens."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.spec_decode.proposer import Proposer
from fastdeploy_sd.types import FinishReason, Request, SchedulerOutput
from tests.doubles.bench import continuations
from tests.doubles.engines import Transcript, run_to_end, toy_config, toy_info, toy_request
from tests.doubles.proposers import RandomLengthProposer
from tests.doubles.toy_executor import AFTER, BEFORE, ToyExecutor
from tests.doubles.toy_grammars import ToyGrammars
from tests.doubles.toy_launcher import ToyLauncher
from tests.doubles.toy_model import ToyModel

GRAMMAR = "start: slow"


def guided(request_id: str, max_tokens: int = 6, num_prompt: int = 3) -> Request:
    return replace(toy_request(request_id, [5, 6, 7] * num_prompt, max_tokens), grammar=GRAMMAR)


@pytest.mark.parametrize("held", [BEFORE, AFTER])
def test_others_go_on_until_its_mask_is_there(held: str) -> None:
    plans: list[SchedulerOutput] = []
    with closing(ToyGrammars()) as grammars:
        grammars.ready.add(GRAMMAR)
        kinds = [held]

        def holds(name: str, num_output: int) -> str:
            return kinds.pop() if name == "slow" and num_output == 2 and kinds else ""

        executor = ToyExecutor(toy_info(), before_step=plans.append, holds=holds)
        executor.grammars = grammars
        engine = Engine(toy_config(), executor)
        engine.submit(guided("slow"))
        engine.submit(toy_request("free", [2, 3], 10))
        transcript = Transcript()
        while "free" not in transcript.last:
            transcript.add(engine.step())
            engine.check_integrity()
        assert len(transcript.token_ids["slow"]) == 2 + (held == AFTER)
        assert [plan.request_ids for plan in plans[4:]] == [("free",)] * 6
        assert not engine.step()
        assert engine.is_stalled
        grammars.announce("slow")
        assert run_to_end(engine, transcript).last["slow"].finish_reason is FinishReason.LENGTH
        assert engine.stats().num_preemptions == 0
        plain = Engine(toy_config(), ToyExecutor(toy_info()))
        plain.submit(replace(guided("slow"), grammar=""))
        assert run_to_end(plain).token_ids["slow"] == transcript.token_ids["slow"]


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_do_not_depend_on_who_is_held_and_when(seed: int, launches: bool) -> None:
    rng = random.Random(seed)
    requests = [guided(f"r{i}", rng.randint(1, 20), rng.randint(1, 8)) for i in range(8)]
    model = ToyModel(97, eos_rate=0.05)
    known = continuations(model, requests)
    drafts = RandomLengthProposer(known, 97, seed) if seed % 3 else None
    plain, held = _run(requests, model, None), _run(requests, model, drafts, rng, launches=launches)
    assert held.token_ids == plain.token_ids
    assert {name: last.finish_reason for name, last in held.last.items()} == {
        name: last.finish_reason for name, last in plain.last.items()
    }


def _run(
    requests: list[Request],
    model: ToyModel,
    proposer: Proposer | None,
    rng: random.Random | None = None,
    *,
    launches: bool = False,
) -> Transcript:
    with closing(ToyGrammars()) as grammars:
        grammars.ready.add(GRAMMAR)
        held: list[str] = []

        def holds(name: str, num_output: int) -> str:
            kind = rng.choice([BEFORE, AFTER, "", ""]) if rng is not None else ""
            held.extend([name] * bool(kind))
            return kind

        info = toy_info(num_blocks=24, max_draft_tokens=3 if proposer else 0)
        executor = ToyExecutor(info, proposer, model=model, holds=holds)
        executor.grammars = grammars
        if launches:
            executor.launcher = ToyLauncher(executor, 1)
        engine, transcript = Engine(toy_config(), executor), Transcript()
        for request in requests:
            engine.submit(request)
        for _ in range(5000):
            if not engine.has_work():
                return transcript
            transcript.add(engine.step())
            engine.check_integrity()
            if held and rng is not None and (engine.is_stalled or rng.random() < 0.6):
                grammars.announce(held.pop(rng.randrange(len(held))))
    raise AssertionError("still busy")


def test_a_held_request_can_be_aborted_and_its_name_used_again() -> None:
    with closing(ToyGrammars()) as grammars:
        grammars.ready.add(GRAMMAR)
        executor = ToyExecutor(toy_info(), holds=lambda name, n: AFTER if n == 1 else "")
        executor.grammars = grammars
        engine = Engine(toy_config(), executor)
        for _ in range(2):
            engine.submit(guided("slow"))
            for _ in range(3):
                engine.step()
            assert engine.is_stalled
            [last] = engine.abort(["slow"])
            assert last.finish_reason is FinishReason.ABORT
            engine.check_integrity()
        assert not engine.has_work()
        assert grammars.users[GRAMMAR] == 0
