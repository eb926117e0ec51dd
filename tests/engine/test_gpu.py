"""Whole engine steps on a GPU: the emulated one runs every kernel of them, and looks at each access.

Its bits are not the CPU's, but the promise is the same: what a request gets depends on nothing but itself.
"""

from __future__ import annotations

import functools
import gc
import pathlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import PLAIN, EngineVariant, Method, open_engine, run_alone, run_cell, standard_methods
from fastdeploy_sd.cli.verify.runs import run
from fastdeploy_sd.config import Config, SpeculativeConfig
from fastdeploy_sd.device.cuda.buffer import CudaTransfers
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import CudaMemory
from fastdeploy_sd.errors import ConfigError, InternalError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason, Pooling, Request, SchedulerOutput, StepResult, VerifyResult
from fastdeploy_sd.worker.loading import loaded
from fastdeploy_sd.worker.step.batch import PendingRows
from fastdeploy_sd.worker.step.runner import _NOT_FINITE, LaunchedStep, ModelRunner
from tests.doubles.engines import Transcript, most_blocks, run_to_end
from tests.doubles.proposers import RandomLengthProposer
from tests.engine.gpu import BATCH, NUM_TOKENS, TIGHT, answers_alone, model_with_layers, short_requests, tiny_config
from tests.engine.models import double, double_with_draft_kv
from tests.engine.test_embeddings import ask as embedding_request
from tests.engine.test_embeddings import run as embeddings_of
from tests.engine.test_failing_rows import Fault, note_requests, runner_of
from tests.models import golden, quantized_files, rewrite
from tests.models.mtp_models import make_model
from tests.models.rewrite import add_windows
from tests.ops.cuda_device import GPU, emulated_chip, loses_the_device

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("kind")]

NUM_DRAFTS = 3


def known_texts(kind: str) -> dict[str, list[int]]:
    """Prompt and answer of every request."""
    answers = answers_alone(kind)
    return {r.request_id: [*r.prompt_token_ids.tolist(), *answers[r.request_id].token_ids] for r in short_requests()}


def method_named(name: str, kind: str) -> Method:
    if name == "oracle":
        return double(name, NUM_DRAFTS, known_texts(kind))
    [method] = [PLAIN] if name == "naive" else standard_methods([name], [NUM_DRAFTS])
    return method


@pytest.mark.parametrize(
    ("way", "method"),
    [(BATCH, "naive"), (BATCH, "oracle"), (BATCH, "auto"), (TIGHT, "suffix")],
    ids=lambda value: value.name if isinstance(value, EngineVariant) else value,
)
def test_answers_depend_on_nothing_but_the_request(kind: str, way: EngineVariant, method: str) -> None:
    config = tiny_config()
    if way is TIGHT:  # what is preempted has blocks in the second level of the prefix cache, too
        config = replace(config, cache=replace(config.cache, swap_space=0.02))
    cell = run_cell(config, way, method_named(method, kind), short_requests(), answers_alone(kind))
    assert (cell.difference, cell.missing) == (None, None)
    assert method in ("naive", "auto") or cell.num_drafts > 0
    assert method != "oracle" or cell.num_accepted > 20


@pytest.mark.usefixtures("small_chip")
def test_embeddings_depend_on_nothing_but_the_text() -> None:
    requests = [embedding_request(f"{i} {p}", [i, 9, 4] * 7, p) for i in (5, 6) for p in Pooling]
    ways = replace(BATCH, max_num_seqs=1, max_num_batched_tokens=64, long_prefill_token_threshold=0), BATCH
    found = []
    for way in ways:
        with open_engine(tiny_config(), way, PLAIN) as engine:
            found.append({name: row.tobytes() for name, row in embeddings_of(engine, requests).items()})
    assert len(set(found[0].values())) == len(requests)
    assert found[0] == found[1]


@pytest.mark.parametrize(("model", "num_drafts", "chip"), [("ernie4_5-tiny", 3, 86), ("deepseek_v3-tiny", 2, 120)])
def test_draft_layers_run_on_the_device(
    kind: str, model: str, num_drafts: int, chip: int, tmp_path: pathlib.Path
) -> None:
    """The emulated one is a chip that gives a block 99 KB of shared memory."""
    config, requests = tiny_config(model_with_layers(tmp_path, model)), short_requests()[:6]
    [method] = standard_methods(["mtp"], [num_drafts])
    with emulated_chip(kind, chip):
        alone = run_alone(config, requests)
        cell = run_cell(config, BATCH, method, requests, alone)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 20


@pytest.mark.usefixtures("small_chip")
def test_a_draft_model_runs_on_the_device() -> None:
    """It drafts for itself: with unquantised weights every greedy draft is right, also after preemption."""
    config, requests = tiny_config(), short_requests()[:6]
    greedy = [replace(r, sampling=SamplingParams(temperature=0.0, ignore_eos=True), grammar="") for r in requests]
    column = Method(
        "draft_model",
        SpeculativeConfig(
            "draft_model", NUM_DRAFTS, model=config.model.model, num_model_steps=NUM_DRAFTS, quantization="none",
            draft_head_quantization="target",
        ),
    )  # fmt: skip
    cell = run_cell(config, TIGHT, column, greedy, run_alone(config, greedy))
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted == cell.num_drafts > 0


@pytest.mark.parametrize("drafts", ["oracle", "random"])
def test_draft_layers_beside_other_drafts_change_no_answer(kind: str, drafts: str, tmp_path: pathlib.Path) -> None:
    """The checkpoint's layers are random: the oracle's drafts stand in for right ones, with the layers' KV.

    Of random trees some drafts are right; accepted paths are moved, and the hidden rows that the layers read.
    """
    column = double_with_draft_kv(f"{drafts} after MTP", NUM_DRAFTS, known_texts(kind))
    config = tiny_config(model_with_layers(tmp_path))
    cell = run_cell(config, TIGHT, column, short_requests(), answers_alone(kind))
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


@pytest.mark.usefixtures("small_chip")
@pytest.mark.parametrize("drafts", ["random", "mtp"])
def test_prompts_go_on_from_snapshots_of_recurrent_states(drafts: str, tmp_path: pathlib.Path) -> None:
    path = rewrite.cut(make_model(tmp_path, "qwen3_5-tiny", "qwen").path, 4, NUM_TOKENS)
    config, requests = tiny_config(path), short_requests()[:4]
    alone = run_alone(config, requests)
    known = {r.request_id: [*r.prompt_token_ids.tolist(), *alone[r.request_id].token_ids] for r in requests}
    column = method_named("mtp", "") if drafts == "mtp" else PLAIN
    if drafts == "random":
        make = functools.partial(RandomLengthProposer, known, NUM_TOKENS)
        column = Method(drafts, SpeculativeConfig("ngram", NUM_DRAFTS), lambda *_: make())
    cell = run_cell(config, TIGHT, column, requests, alone)
    assert (cell.difference, cell.missing) == (None, None)
    assert drafts != "random" or 0 < cell.num_accepted < cell.num_drafts
    assert cell.num_drafts > 0


@pytest.mark.usefixtures("small_chip")
def test_layers_with_a_window_give_blocks_back(tmp_path: pathlib.Path) -> None:
    path, requests = model_with_layers(tmp_path), short_requests()[:4]
    add_windows(path, ["full_attention", "sliding_attention"], 12)
    config, method = tiny_config(path), method_named("mtp", "")
    cell = run_cell(config, replace(TIGHT, num_blocks=9, must_hit=False), method, requests, run_alone(config, requests))
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0
    with open_engine(config, BATCH, method) as engine:  # steps of 10 tokens
        assert most_blocks(engine, 76, max_tokens=3) <= 80 // 16 + 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in golden.NAMES), ("qwen3-tiny", "float16"), ("ernie4_5_moe-tiny", "float16")],
)
def test_golden_checkpoints_generate_the_references_tokens(name: str, dtype: Literal["float32", "float16"]) -> None:
    """The reference computes in float32."""
    sampling, case = SamplingParams(temperature=0.0, ignore_eos=True), golden.cases(name)[1]
    config = tiny_config(golden.ROOT / name)
    # Without a limit of its own, which may decide what a model computes (longrope).
    model = replace(config.model, dtype=dtype, max_model_len=None)
    with open_engine(replace(config, model=model), BATCH, PLAIN) as engine:
        [answer] = run(engine, [Request("a", case.prompt, sampling, max_tokens=6, seed=0)]).values()
    assert answer.token_ids == tuple(case.greedy[:6].tolist())


@pytest.mark.usefixtures("small_chip")
def test_float16_changes_no_answer_with_the_way(tmp_path: pathlib.Path) -> None:
    config, requests = tiny_config(model_with_layers(tmp_path)), short_requests()[:4]
    config = replace(config, model=replace(config.model, dtype="float16"))
    cell = run_cell(config, TIGHT, method_named("mtp", ""), requests, run_alone(config, requests))
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_drafts > 0


@pytest.mark.parametrize(("kv", "weights"), [("int8", None), ("fp8", "fp8")])
def test_quantised_caches_and_weights_change_no_answer_with_the_way(
    kv: Literal["int8", "fp8"], weights: Literal["fp8"] | None, tmp_path: pathlib.Path
) -> None:
    """Of a checkpoint in FP8, which stays as it is or gets rows of FP8 too."""
    requests = short_requests()[:4]
    path, _ = quantized_files.write(tmp_path, "llama-tiny", quantized_files.float8("channel", {}))
    config = tiny_config(path)
    config = replace(
        config,
        cache=replace(config.cache, kv_cache_dtype=kv),
        model=replace(config.model, quantization=weights),
    )
    cell = run_cell(config, TIGHT, method_named("ngram", ""), requests, run_alone(config, requests))
    assert (cell.difference, cell.missing) == (None, None)


def test_penalties_count_what_was_produced() -> None:
    """The token that is liked most loses two of its lead of one whenever it is produced."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, frequency_penalty=2.0, logit_bias={17: 91.0, 350: 90.0})
    with open_engine(tiny_config(), BATCH, PLAIN) as engine:
        [answer] = run(engine, [Request("a", np.array([5, 6], np.int32), sampling, max_tokens=4, seed=0)]).values()
    assert answer.token_ids == (17, 350, 17, 350)


def test_rows_without_a_distribution_fail_their_request_only(tmp_path: pathlib.Path) -> None:
    tensors, bad_token = rewrite.read("llama-tiny"), 3000
    tensors["model.embed_tokens.weight"][bad_token] = 0x7FC0  # not a number
    path = rewrite.write_folder(tmp_path / "model", "llama-tiny")
    rewrite.write_file(path / "model.safetensors", tensors)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    prompts = {"good": [5, 6, 7], "bad": [5, bad_token, 7], "other": [9, 10]}
    with open_engine(tiny_config(path), BATCH, PLAIN) as engine:
        for name, prompt in prompts.items():
            engine.submit(Request(name, np.array(prompt, np.int32), sampling, max_tokens=3, seed=0))
        transcript = run_to_end(engine)
    assert {name: last.finish_reason for name, last in transcript.last.items()} == {
        "good": FinishReason.LENGTH, "bad": FinishReason.ERROR, "other": FinishReason.LENGTH,
    }  # fmt: skip
    assert transcript.last["bad"].error == _NOT_FINITE


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize(
    ("method", "phase"), [("ngram", "batch"), ("ngram", "verify"), ("ngram", "commit"), ("naive", "forward")]
)
def test_a_step_that_fails_costs_its_culprit_only(kind: str, method: str, phase: str) -> None:
    """The others' rows run again, over the same KV and the same buffers of the host's arrays."""
    requests, expected = short_requests()[:4], answers_alone(kind)
    if method == "naive":
        requests = [r for r in short_requests() if is_plain(r)][:4]
    fault = Fault([requests[1].request_id])
    with open_engine(tiny_config(), BATCH, method_named(method, kind)) as engine:
        fault.install(runner_of(engine), phase)
        for request in requests:
            engine.submit(request)
        transcript = run_to_end(engine)
    assert fault.num_raised > 0
    for request in requests:
        tokens = tuple(transcript.token_ids[request.request_id])
        want = expected[request.request_id].token_ids
        # The fault comes with the third token, or with the step that had begun when that was known.
        assert tokens in ((want[:3], want[:4]) if request is requests[1] else (want,))


@pytest.mark.usefixtures("small_chip", "expects_step_failures")
def test_a_step_whose_tokens_the_device_alone_has_runs_again() -> None:
    """With the one that has begun after it, if one has: the device is sent what the host knows."""
    requests = brief_requests()
    with open_engine(in_order(tiny_config()), BATCH, PLAIN) as engine:
        want = {request_id: answer.token_ids for request_id, answer in run(engine, requests).items()}
    with open_engine(tiny_config(), BATCH, PLAIN) as engine:
        batches = runner_of(engine)._batches
        for phase, is_done in (("open", True), ("commit_pending", False)):
            with pytest.MonkeyPatch.context() as patch:
                failing = FailingOnce(getattr(batches, phase), is_done=is_done)
                patch.setattr(batches, phase, failing)
                assert {name: answer.token_ids for name, answer in run(engine, requests).items()} == want
                assert failing.num_calls > 1


class FailingOnce:
    """A call that raises when it is made for the second time, instead or when it is done."""

    def __init__(self, run: Callable[..., object], *, is_done: bool) -> None:
        self._run, self._is_done = run, is_done
        self.num_calls = 0

    def __call__(self, *arguments: object) -> object:
        self.num_calls += 1
        is_due = self.num_calls == 2
        found = None if is_due and not self._is_done else self._run(*arguments)
        if is_due:
            raise MemoryError("once")
        return found


@pytest.mark.usefixtures("small_chip", "expects_step_failures")
def test_a_table_row_is_given_away_while_a_step_of_its_last_owner_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name, too; also when that step has to run again, without its owner."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, frequency_penalty=2.0)
    first, second = (replace(r, request_id="a", sampling=sampling) for r in brief_requests()[:2])
    # One token shorter: the step that runs for it would be the last of the other's prompt.
    first = replace(first, prompt_token_ids=first.prompt_token_ids[1:].copy())
    with open_engine(tiny_config(), replace(BATCH, max_num_seqs=1), PLAIN) as engine:
        want = run(engine, [second])["a"].token_ids
        batches = runner_of(engine)._batches
        commit, owners, failures = batches.commit_pending, list[int](), list[MemoryError]()

        def noted(rows: PendingRows, result: VerifyResult) -> None:
            if not rows.is_kept.all():
                owners.append(rows.num_requests)
                if failures:
                    raise failures.pop()
            commit(rows, result)

        monkeypatch.setattr(batches, "commit_pending", noted)
        for number in (1, 2):
            failures += [MemoryError("once")] * (number - 1)
            engine.submit(first)
            while not engine.step():
                pass
            engine.abort(["a"])
            engine.submit(second)
            assert tuple(run_to_end(engine).token_ids["a"]) == want
            assert (owners, failures) == ([1] * number, [])


def test_the_end_of_an_executor_frees_the_model_also_while_a_step_runs() -> None:
    """Its engine may be there for longer."""
    with open_engine(tiny_config(), BATCH, PLAIN) as engine:
        runner = weakref.ref(runner_of(engine))
        engine.submit(brief_requests()[0])
        engine.step()
    gc.collect()
    assert engine.has_work()
    assert runner() is None


def in_order(config: Config) -> Config:
    return replace(config, scheduler=replace(config.scheduler, async_scheduling=False))


def is_plain(request: Request) -> bool:
    """Whether a step of it may begin before the one before it is over."""
    has_rules = request.grammar or request.bad_words_token_ids or request.sampling.min_tokens
    return not has_rules and request.sampling.logprobs is None


@pytest.mark.usefixtures("small_chip")
def test_steps_that_begin_before_their_tokens_are_known_change_none() -> None:
    """Requests come, end by length or by the token that is on its way, are preempted, and find what others left."""
    requests = [replace(r, grammar="", bad_words_token_ids=()) for r in short_requests()[: TIGHT.num_requests]]
    requests = [replace(r, sampling=replace(r.sampling, logprobs=None, min_tokens=0)) for r in requests]
    config = tiny_config()
    want = answers_of(in_order(config), requests)
    for i in (0, 2):  # end in the middle, the next step under way
        token_ids = want[requests[i].request_id]
        requests[i] = replace(requests[i], sampling=replace(requests[i].sampling, stop_token_ids=token_ids[4:5]))
        want[requests[i].request_id] = token_ids[: token_ids.index(token_ids[4]) + 1]
    assert answers_of(config, requests) == want


def brief_requests() -> list[Request]:
    """Three of these, of few steps."""
    found = [r for r in short_requests() if is_plain(r)][:3]
    return [replace(r, prompt_token_ids=r.prompt_token_ids[-6:].copy(), max_tokens=4) for r in found]


def answers_of(config: Config, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    with open_engine(config, TIGHT, PLAIN) as engine:
        note_sizes(runner_of(engine))
        answers = run(engine, requests, 2)
        assert engine.stats().num_preemptions > 0
    return {request_id: answer.token_ids for request_id, answer in answers.items()}


def note_sizes(runner: ModelRunner) -> None:
    """Have its board looked at after each step: a method that chooses is told of that one, also when the next runs."""
    complete, step_stats = runner._complete, runner._step_stats

    def completed(step: LaunchedStep, *found: Any) -> StepResult:
        result, plan = complete(step, *found), step.plan
        assert (step_stats.num_tokens, step_stats.num_requests) == (plan.num_new_tokens.sum(), len(plan.request_ids))
        assert step_stats.num_prompt_tokens == plan.num_new_tokens.sum() - step.num_logits
        return result

    setattr(runner, "_complete", completed)  # noqa: B010 (mypy takes methods for constants)


@pytest.mark.usefixtures("expects_step_failures")
def test_what_could_not_be_sent_goes_up_with_the_next_try(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a step with a new request, whose table row another one had before, is refused."""
    requests, expected = short_requests()[:6], answers_alone(kind)
    next_staging, new = CudaTransfers._next_staging, list[Request]()

    def fail_once(self: CudaTransfers) -> object:
        if new:
            new.clear()
            raise ValueError("a copy was refused")
        return next_staging(self)

    monkeypatch.setattr(CudaTransfers, "_next_staging", fail_once)
    transcript = Transcript()
    with open_engine(tiny_config(), BATCH, PLAIN) as engine:
        for request in requests:
            new.append(request)
            engine.submit(request)
            run_to_end(engine, transcript)
            assert not new
    for request in requests:
        assert tuple(transcript.token_ids[request.request_id]) == expected[request.request_id].token_ids


def test_a_kernel_that_goes_wrong_ends_the_engine(kind: str) -> None:
    """Whatever else is tried fails too, so nothing is: no request is blamed for it."""
    if kind == GPU:
        pytest.skip("all that this process does after it would fail")
    with open_engine(tiny_config(), BATCH, PLAIN) as engine, loses_the_device():
        runner = runner_of(engine)
        build, running = runner._batches.build, note_requests(runner)
        num_steps = 0

        def build_wrongly(plan: SchedulerOutput, before: PendingRows | None = None) -> None:
            nonlocal num_steps
            build(plan, before)
            if len(running) == 2 and runner._memory.num_logits:
                num_steps += 1
                runner._memory.logits_indices[0] = 1 << 20  # outside of what the pass has computed

        setattr(runner._batches, "build", build_wrongly)  # noqa: B010 (mypy takes methods for constants)
        for request in short_requests()[:2]:
            engine.submit(request)
        with pytest.raises(InternalError, match=r"the GPU has failed: .*gather_output_rows.*out of bounds"):
            run_to_end(engine)
        assert num_steps <= 2  # one more had begun


def test_a_step_is_one_copy_up_and_one_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changed goes up together, and only the output comes back; and no call waits for a step that has begun
    since."""
    copies: list[int] = []
    others: set[str] = set()
    start = CudaLibrary.call

    def noted(self: CudaLibrary, name: str, *arguments: object) -> None:
        if name in ("copy", "start_copy"):
            copies.append(arguments[2].value)  # type: ignore[attr-defined]
        else:
            others.add(name)
        start(self, name, *arguments)

    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    with open_engine(tiny_config(), BATCH, PLAIN) as engine:
        monkeypatch.setattr(CudaLibrary, "call", noted)
        for i in range(2):
            engine.submit(Request(f"{i}", np.array([5, 6, 7], np.int32), sampling, max_tokens=4, seed=0))
        for _ in range(4):  # the tokens of the last step are taken when there is nothing more to start
            copies.clear()
            engine.step()
            assert len(copies) == 2
            assert copies[1] < 1024  # of four requests and as many rows
        assert len(engine.step()) == 2
        assert not engine.has_work()
        assert len(copies) == 2
    assert not {"stream_synchronize", "synchronize"} & others


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [
        ("load_model", "model, quantization, device: expected weights"),
        ("allocate_kv", "kv_cache_memory_gb, num_gpu_blocks_override: expected what the system has memory for"),
        ("StepBuffers", "kv_cache_memory_gb, .*max_num_seqs, .*num_speculative_tokens: expected steps"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_which_options_help(
    stage: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(_: CudaMemory, num_bytes: int) -> NoReturn:
        raise MemoryError(f"{num_bytes} bytes of the GPU's memory, of which 0 are free")

    run_stage = getattr(loaded, stage)

    def without_memory(*arguments: object) -> object:
        monkeypatch.setattr(CudaMemory, "take", take)
        return run_stage(*arguments)

    monkeypatch.setattr(loaded, stage, without_memory)
    wanted += r".* got \d+ bytes of the GPU's memory, of which 0 are free"
    with pytest.raises(ConfigError, match=wanted), open_engine(tiny_config(), BATCH, PLAIN):
        pass


@pytest.mark.usefixtures("small_chip")
def test_steps_take_no_more_memory_than_there_was_at_the_start(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CudaLibrary.made

    def noted(self: CudaLibrary, name: str, *arguments: object) -> int:
        assert not name.startswith("allocate")
        return made(self, name, *arguments)

    config = tiny_config(model_with_layers(tmp_path))
    with open_engine(config, BATCH, method_named("mtp", kind)) as engine, monkeypatch.context() as patch:
        patch.setattr(CudaLibrary, "made", noted)
        run(engine, [replace(request, max_tokens=2) for request in short_requests()[:4]])
