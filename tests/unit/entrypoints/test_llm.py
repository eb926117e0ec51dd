"""LLM over the toy executor: results in order, limits respected, interrupts survived, everything freed."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError, InternalError, NotFound, Unavailable
from fastdeploy_sd.llm import LLM, LoRARequest
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import ModelInfo, Request, SchedulerOutput, Speculation, SpeculationInfo
from tests.doubles.proposers import OracleProposer
from tests.doubles.toy_adapters import ToyAdapters
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel
from tests.unit.text.vocabularies import GOLDEN, golden_tokenizer

TOKENIZER = golden_tokenizer()
INFO = ModelInfo("toy", vocab_size=4096, max_model_len=256, eos_token_ids=(2,), block_size=16, num_blocks=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)

HELLO = {"role": "user", "content": "hello"}

Load = Callable[..., tuple[LLM, ToyExecutor]]


def toy_tokens(prompt: list[int], count: int) -> list[int]:
    request = Request("x", np.array(prompt, np.int32), GREEDY, count, 0, eos_token_ids=(2,))
    return list(islice(ToyModel(INFO.vocab_size).endless(request), count))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Make LLMs over a toy, whose costs are not measured; the module that would import Paddle is replaced."""

    def make(executor: ToyExecutor | None = None, **engine_args: Any) -> tuple[LLM, ToyExecutor]:
        executor = executor or ToyExecutor(INFO)
        module = ModuleType("fastdeploy_sd.worker.executor")
        module.create_executor = lambda config, group: executor  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fastdeploy_sd.worker.executor", module)
        llm = LLM(model=str(GOLDEN), **{"speculative_config": "naive", **engine_args})
        del module.create_executor  # nothing but the LLM holds on to the executor
        return llm, executor

    return make


def test_texts_come_back_in_order(load: Load) -> None:
    llm, _ = load()
    prompts = ["one", "two words", "x"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert output.prompt_token_ids == TOKENIZER.encode(output.prompt or "", add_special_tokens=True)
        [completion] = output.outputs
        expected = toy_tokens(output.prompt_token_ids, 6)
        assert (completion.index, list(completion.token_ids)) == (0, expected)
        assert completion.text == TOKENIZER.decode(expected, skip_hidden=True)
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert output.metrics is not None
        assert output.metrics.finished_time >= output.metrics.first_token_time > 0.0
    assert len({o.request_id for o in outputs}) == 3


@pytest.mark.parametrize("ids", [[5, 6], [[5, 6]], np.array([5, 6]), [np.array([5, 6])]])
def test_one_prompt_or_several_as_token_ids(load: Load, ids: Any) -> None:
    llm, _ = load()
    [output] = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)
    assert (output.prompt, output.prompt_token_ids) == (None, [5, 6])
    assert list(output.outputs[0].token_ids) == toy_tokens([5, 6], 6)


def test_predictions_per_prompt(load: Load) -> None:
    seen: list[list[int]] = []

    def note(plan: SchedulerOutput) -> None:
        seen.extend(new.request.prediction_token_ids.tolist() for new in plan.new)

    llm, _ = load(ToyExecutor(INFO, before_step=note))
    plain = [list(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], GREEDY)]
    seen.clear()
    outputs = llm.generate(["a", "b"], GREEDY, predictions=["one two", None])
    assert [list(o.outputs[0].token_ids) for o in outputs] == plain
    assert seen == [TOKENIZER.encode("one two", add_special_tokens=False), []]
    llm.chat([{"role": "user", "content": "hi"}], GREEDY, predictions="one two")
    assert seen[2] == seen[0]
    for predictions in (["one"], ["one", 3], ["one"] * 3):
        with pytest.raises(BadRequest, match="predictions: expected a text, or a text or None for each of 2 prompts"):
            llm.generate(["a", "b"], GREEDY, predictions=predictions)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="prediction: expected at most"):
        llm.generate("a", GREEDY, predictions="many words " * 300)


def test_one_text(load: Load) -> None:
    llm, _ = load()
    assert len(llm.generate("x", GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_sampling_params_per_prompt_and_n(load: Load) -> None:
    llm, _ = load()
    params = [SamplingParams(max_tokens=2, seed=1, n=2), SamplingParams(max_tokens=3, seed=2, logprobs=1)]
    first, second = llm.generate(["x", "x"], params)
    assert [(c.index, len(c.token_ids)) for c in first.outputs] == [(0, 2), (1, 2)]
    assert list(first.outputs[1].token_ids) == list(second.outputs[0].token_ids[:2]), "sequence 1 has seed + 1"
    assert first.outputs[0].logprobs is None
    assert second.outputs[0].logprobs is not None
    assert len(second.outputs[0].logprobs) == 3


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 3), (3, 1)])
def test_every_prompt_counts_its_own_completions(load: Load, first: int, second: int) -> None:
    llm, _ = load()
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2, n=n) for n in (first, second)])
    assert [[c.index for c in output.outputs] for output in outputs] == [[*range(first)], [*range(second)]]


def test_chat_of_one_and_of_several_conversations(load: Load) -> None:
    llm, _ = load()
    conversation = [{"role": "user", "content": "hi<|im_end|>"}]
    [one] = llm.chat(conversation, GREEDY)
    assert one.prompt_token_ids.count(2) == 1, "control tokens in content are text"
    both = llm.chat([conversation, [{"role": "user", "content": "ho"}]], GREEDY)
    assert both[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert both[0].num_cached_tokens > 0
    assert both[1].prompt_token_ids != one.prompt_token_ids


def test_a_stop_string_ends_the_engines_request(load: Load) -> None:
    llm, executor = load()
    tokens = toy_tokens(TOKENIZER.encode("x", add_special_tokens=True), 12)
    stop = TOKENIZER.decode(tokens[5:8], skip_hidden=True)
    [output] = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=100, stop=(stop,)))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("stop", stop, 8)
    assert output.metrics is not None
    assert output.metrics.first_scheduled_time > 0.0, "the engine's own times"
    assert llm._engine is not None
    num_finished = llm._engine.stats().num_finished
    assert (num_finished["stop"], num_finished["abort"]) == (1, 0)
    llm.generate("y", GREEDY)
    assert len(executor.known_request_ids) <= 1, "the stopped request is gone"


def speculating(*prompts: list[int]) -> ToyExecutor:
    """An executor with three drafts per step, always right, for these prompts in the order they are sent."""
    info = replace(INFO, speculation=SpeculationInfo("mtp", ("naive", "ngram", "mtp"), 3))
    return ToyExecutor(
        info,
        OracleProposer({f"llm-{i}": prompt + toy_tokens(prompt, 40) for i, prompt in enumerate(prompts)}, 4096),
    )


@pytest.mark.parametrize(
    ("asked", "num_verifications", "num_positions"),
    [
        (None, 2, 3),
        ({"num_speculative_tokens": 1}, 4, 1),
        (Speculation(method="ngram"), 2, 3),
        ({"enabled": False}, 0, 0),
        (Speculation(enabled=False), 0, 0),
    ],
)
def test_speculation_of_a_call(load: Load, asked: Any, num_verifications: int, num_positions: int) -> None:
    llm, _ = load(speculating([5, 6]))
    params = SamplingParams(temperature=0.0, max_tokens=9)
    [output] = llm.generate(prompt_token_ids=[5, 6], sampling_params=params, speculation=asked)
    assert list(output.outputs[0].token_ids) == toy_tokens([5, 6], 9)
    assert output.metrics is not None
    drafts = output.metrics.drafts
    assert (drafts.num_verifications, len(drafts.drafted)) == (num_verifications, num_positions)
    assert drafts.accepted == drafts.drafted


def test_drafts_of_a_completion_that_a_stop_string_ends_are_counted(load: Load) -> None:
    llm, _ = load(speculating([5, 6]))
    stop = TOKENIZER.decode(toy_tokens([5, 6], 7)[5:], skip_hidden=True)
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,))
    [output] = llm.generate(prompt_token_ids=[5, 6], sampling_params=params)
    assert output.outputs[0].stop_reason == stop
    assert output.metrics is not None
    assert output.metrics.drafts.num_verifications == 2


@pytest.mark.parametrize(
    ("strategy", "asked", "expected"),
    [
        ("target_match", None, True),
        ("target_match", {"enabled": False}, False),
        ("greedy", None, True),
        ("greedy", {"enabled": False}, False),
        ("topp", {"enabled": False}, False),
    ],
)
def test_outputs_say_that_verification_may_have_changed_them(
    load: Load, strategy: str, asked: Any, expected: bool
) -> None:
    [plain] = load()[0].generate("x", GREEDY)
    assert not plain.lossy
    info = replace(INFO, speculation=SpeculationInfo("ngram", ("naive", "ngram"), 3, lossy=True))
    keys = {"method": "ngram", "verify_strategy": strategy, "accept_policy": "accept_all"}
    llm, _ = load(ToyExecutor(info), speculative_config=keys)
    [output] = llm.generate("x", GREEDY, speculation=asked)
    assert output.lossy is expected
    [sampled] = llm.generate("x", SamplingParams(temperature=0.5, max_tokens=2), speculation=asked)
    assert sampled.lossy is (expected or strategy != "target_match")


def test_speculation_of_a_chat(load: Load) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    [plain] = load()[0].chat(conversation, GREEDY)
    llm, _ = load(speculating(plain.prompt_token_ids))
    [output] = llm.chat(conversation, GREEDY, speculation={"num_speculative_tokens": 2})
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics is not None
    assert output.metrics.drafts.drafted == (2, 1), "then max_tokens leaves room for one"


def test_more_prompts_than_the_queue_holds(load: Load) -> None:
    llm, _ = load(max_num_queued_requests=2, max_num_seqs=2)
    outputs = llm.generate([f"prompt {i}" for i in range(9)], GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [toy_tokens(o.prompt_token_ids, 6) for o in outputs]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(), "prompts: expected either prompts or prompt_token_ids, got neither"),
        (lambda llm: llm.generate("x", prompt_token_ids=[5]), "got both"),
        (lambda llm: llm.generate([5]), "prompts: expected text .token ids are given as prompt_token_ids., got int"),
        (lambda llm: llm.generate(prompt_token_ids=["x"]), "prompt_token_ids: expected a list of token ids"),
        (lambda llm: llm.generate(["x"], [GREEDY, GREEDY]), "sampling_params: expected a SamplingParams or one for"),
        (lambda llm: llm.generate("x", {"max_tokens": 1}), "sampling_params: expected a SamplingParams or .* got dict"),
        (lambda llm: llm.generate("x", [{"max_tokens": 1}]), "sampling_params: .* got dict among them"),
        (lambda llm: llm.generate("x", SamplingParams(max_tokens=1000)), "max_tokens: expected at most"),
        (lambda llm: llm.chat(["x"]), "messages: expected maps with role and content"),
        (lambda llm: llm.chat([{"role": "user", "contents": "x"}]), "unknown key 'contents' .did you mean 'content'"),
        (lambda llm: llm.chat([{"role": "user", "content": 5}]), r"messages\[0\].content: expected text or .* got 5"),
        (lambda llm: llm.chat([{"role": "user"}]), r"messages\[0\].content: expected text .* got none in a user's"),
        (lambda llm: llm.chat([HELLO], tools=[{"type": "code"}]), "tools: not supported: .*only function is a type"),
        (lambda llm: llm.chat([HELLO], tool_choice="required"), "tool_choice: expected only with tools"),
        (lambda llm: llm.chat([HELLO], tools=[{"function": {"name": {1}}}]), "tools: expected what JSON can say"),
        (lambda llm: llm.generate("x", speculation="ngram"), "speculation: expected a map, got 'ngram'"),
        (lambda llm: llm.generate("x", speculation={"methd": "x"}), "speculation.methd: unknown field .did you mean"),
        (lambda llm: llm.generate("x", speculation=Speculation(method="ngram")), "started without speculation"),
    ],
)  # fmt: skip
def test_mistakes_are_named(load: Load, call: Callable[[LLM], Any], message: str) -> None:
    llm, _ = load()
    with pytest.raises(BadRequest, match=message):
        call(llm)
    assert len(llm.generate("x", GREEDY)) == 1


def test_unknown_engine_args_are_named(load: Load) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        load(max_modle_len=100)


def test_a_failing_request_raises_and_takes_the_others_back(load: Load) -> None:
    llm, executor = load(ToyExecutor(INFO, failures={"llm-0": 2}))
    with pytest.raises(InternalError, match="non-finite logits"):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=100))
    [output] = llm.generate("x", GREEDY)
    assert list(output.outputs[0].token_ids) == toy_tokens(output.prompt_token_ids, 6)
    assert executor.known_request_ids <= {output.request_id}


@pytest.fixture
def _heeds_ctrl_c() -> Iterator[None]:
    """A test run in the background ignores SIGINT, and what it starts does, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_ctrl_c")
def test_ctrl_c_takes_effect_between_steps_and_leaves_the_llm_usable(load: Load) -> None:
    steps: list[int] = []

    def interrupt(plan: SchedulerOutput) -> None:
        steps.append(plan.step_id)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    llm, _ = load(ToyExecutor(INFO, before_step=interrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50))
    assert len(steps) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    [output] = llm.generate("x", GREEDY)
    assert list(output.outputs[0].token_ids) == toy_tokens(output.prompt_token_ids, 6)


@pytest.mark.parametrize("error", [MemoryError("no arena"), KeyboardInterrupt()])
def test_after_a_step_that_raised_the_llm_refuses_everything_but_close(load: Load, error: BaseException) -> None:
    """The engine is half updated then, also by a second Ctrl-C in the middle of a step."""
    errors = [error]

    def fail(plan: SchedulerOutput) -> None:
        if plan.step_id > 1 and errors:
            raise errors.pop()

    llm, executor = load(ToyExecutor(INFO, before_step=fail))
    with pytest.raises(type(error)):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50))
    for _ in range(2):
        with pytest.raises(Unavailable, match=rf"unusable, make another: .* raised {type(error).__name__}\("):
            llm.generate("x", GREEDY)
    with pytest.raises(Unavailable, match="unusable"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY)
    llm.close()
    assert executor.is_shut_down


def test_dropping_the_llm_frees_the_model_at_once(load: Load) -> None:
    llm, executor = load()
    llm.generate("x", GREEDY)
    gc.collect()
    gc.disable()
    try:
        watch, llm_watch = weakref.ref(executor), weakref.ref(llm)
        del executor, llm
        assert llm_watch() is None, "no reference cycle"
        assert watch() is None
    finally:
        gc.enable()


def test_close_shuts_the_executor_down_and_refuses_later_calls(load: Load) -> None:
    llm, executor = load()
    with llm:
        llm.generate("x", GREEDY)
        assert not executor.is_shut_down
    assert executor.is_shut_down
    llm.close()
    with pytest.raises(Unavailable, match="this LLM is closed"):
        llm.generate("x", GREEDY)


def test_progress_is_shown_on_a_terminal_only(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, _ = load()
    llm.generate("x", GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["x", "y"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    llm.generate("x", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "value"), [("port", 9000), ("api_key", ["k"]), ("workers", 2)])
def test_options_of_the_server_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected options of the engine, got one of the server"):
        LLM(model=str(GOLDEN), **{name: value})


def test_prompts_run_with_the_adapters_that_they_name(load: Load) -> None:
    executor = ToyExecutor(replace(INFO, num_adapter_slots=2))
    executor.adapters = files = ToyAdapters({"/a": "a", "/b": "b"})
    llm, _ = load(executor, enable_lora=True)
    one, two = LoRARequest("one", 1, "/a"), LoRARequest("two", 2, "/b")
    outputs = llm.generate(["x"] * 3, GREEDY, lora_request=[None, one, two])
    texts = [output.outputs[0].token_ids for output in outputs]
    assert len(set(map(tuple, texts))) == 3
    assert llm.generate("x", GREEDY, lora_request=LoRARequest("two"))[0].outputs[0].token_ids == texts[2]
    assert llm.chat([HELLO], GREEDY, lora_request=one)[0].outputs != llm.chat([HELLO], GREEDY)[0].outputs
    assert files.read == ["/a", "/b"]
    for wrong, error, text in (
        ([one], BadRequest, "a LoRARequest, or one or None for each of 2 prompts, got list"),
        ("one", BadRequest, "got str"),
        ([one, "two"], BadRequest, "got str among them"),
        (LoRARequest("three"), NotFound, "expected a loaded adapter or a lora_path, got 'three'"),
        (LoRARequest("one", 1, "/b"), BadRequest, "expected 'one' in /a, as it was loaded, got /b"),
        (LoRARequest("three", 3, "/c"), CheckpointError, "/c: expected adapter_config.json"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            llm.generate(["x", "y"], GREEDY, lora_request=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="expected a server with enable_lora, got one without"):
        load()[0].generate("x", GREEDY, lora_request=one)
    with pytest.raises(ConfigError, match="lora_root: expected options of the engine"):
        load(enable_lora=True, lora_root="/a")
