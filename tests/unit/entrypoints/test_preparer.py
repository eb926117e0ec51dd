"""Bodies of every size become the same jobs, and none that is refused, killed or abandoned harms the next."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.config import Config, ModelConfig
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.entrypoints.openai import preparer as preparer_module
from fastdeploy_sd.entrypoints.openai.body_shape import MAX_PARTS, verify_shape
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.preparation import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    RESPONSE,
    TOKENIZE,
    Given,
    Preparation,
)
from fastdeploy_sd.entrypoints.openai.preparer import POOLS, Preparer
from fastdeploy_sd.errors import BadRequest, FdsdError, Unavailable
from fastdeploy_sd.process.sandbox import Worker
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.tokenizer import load_tokenizer
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.wire.codec import pack
from tests.unit.text.vocabularies import GOLDEN

pytestmark = pytest.mark.slow

INFO = ModelInfo("m", vocab_size=4096, max_model_len=4096, eos_token_ids=(2,), block_size=16, num_blocks=512)
CONFIG = Config(model=ModelConfig(model=str(GOLDEN)))
SMALL = json.dumps({"prompt": "hello world", "seed": 5, "bad_words": ["foo"], "echo": True}).encode()
SIZES = [int(pool.max_bytes) + 1 for pool in POOLS[:2]]
DEADLINE_S = 120.0


@contextlib.asynccontextmanager
async def preparing(config: Config = CONFIG) -> AsyncIterator[Preparer]:
    preparer = Preparer(config, lambda: INFO)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield preparer
    finally:
        preparer.close()


def padded(body: bytes, size: int) -> bytes:
    """The same JSON in so many bytes."""
    return body + b" " * (size - len(body))


async def test_a_job_does_not_depend_on_where_it_is_prepared() -> None:
    async with preparing() as preparer:
        local = await preparer.prepare(COMPLETION, SMALL)
        assert isinstance(local, GenerationJob)
        for size in SIZES:
            job = await preparer.prepare(COMPLETION, padded(SMALL, size))
            assert isinstance(job, GenerationJob)
            assert job.requests[0].prompt_token_ids.tolist() == local.requests[0].prompt_token_ids.tolist()
            assert job.requests.bad_words_token_ids == local.requests.bad_words_token_ids
            assert (job.requests.seeds, job.requests.sampling) == (local.requests.seeds, local.requests.sampling)
            assert (job.answer, job.echoed_texts, job.model) == (local.answer, local.echoed_texts, local.model)


USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SMALL_BODIES: list[tuple[str, Any]] = [
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}, "n": 2, "logprobs": True}),
    (CHAT, {"messages": [{"role": "user", "content": "<|im_end|> \u00e9 \U0001f680"}], "tools": [TOOL]}),
    (CHAT, {"messages": [*USER, {"role": "assistant", "content": "a"}], "continue_final_message": True}),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": USER * 300}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}),
    (CHAT, {"messages": USER, "temperature": "hot"}),
    (CHAT, {"messages": USER, "max_tokens": 10**9}),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}),
    (CHAT, {"messages": USER, "model": "other"}),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": "("}}),
    (RESPONSE, {"input": "hello"}),
    (RESPONSE, {"input": "hello", "text": {"format": {"type": "json_schema"}}}),
    (COMPLETION, {"prompt": "hello", "echo": True}),
    (COMPLETION, {"prompt": [-1]}),
    (TOKENIZE, {"messages": USER}),
    (TOKENIZE, {"prompt": 1}),
    (DETOKENIZE, {"tokens": [5, 6]}),
    (DETOKENIZE, {"tokens": [10**6]}),
]


async def outcome_of(prepared: Awaitable[GenerationJob | str]) -> bytes:
    """Return what a client would get, without what differs from call to call."""
    try:
        result = await prepared
    except FdsdError as error:
        return pack(WireError.of(error))
    if isinstance(result, str):
        return result.encode()
    requests = replace(result.requests, request_id="", seeds=(), arrival_time=0.0)
    return pack(replace(result, job_id="", created=0, requests=requests))


async def test_a_small_body_comes_to_the_same_in_a_thread_and_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [(task, json.dumps(body).encode()) for task, body in SMALL_BODIES]
    bodies += [(CHAT, b"{"), (CHAT, b"[" * 10_000), (CHAT, b'{"messages":[],"messages":[]}')]
    config = Config(model=ModelConfig(model="demo"))
    outcomes = []
    for local_bytes in (preparer_module.LOCAL_BYTES, -1):
        monkeypatch.setattr(preparer_module, "LOCAL_BYTES", local_bytes)
        async with preparing(config) as preparer:
            outcomes.append(
                [
                    await outcome_of(
                        preparer.compute(task, body) if "tokenize" in task else preparer.prepare(task, body)
                    )
                    for task, body in bodies
                ]
            )
    for (task, body), local, worker in zip(bodies, *outcomes, strict=True):
        assert local == worker, (task, body[:200])


async def test_a_small_chat_needs_no_process_and_a_grammar_does() -> None:
    async with preparing() as preparer:
        assert await preparer.prepare(COMPLETION, SMALL)
        assert await preparer.prepare(CHAT, json.dumps({"messages": USER}).encode())
        assert preparer.server_pid is None
    async with preparing(Config(model=ModelConfig(model="demo"))) as preparer:
        body = {"messages": USER, "response_format": {"type": "json_object"}}
        assert await preparer.prepare(CHAT, json.dumps(body).encode())
        assert len(workers_of(preparer)) == 1


async def test_a_template_that_never_ends_costs_a_moment_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules = replace(preparer_module.POOLS[0], limits=replace(preparer_module.POOLS[0].limits, cpu_s=1))
    monkeypatch.setattr(preparer_module, "POOLS", (rules,))
    for file in GOLDEN.iterdir():
        if file.name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(file, tmp_path)
    endless = "{% for a in range(100000) %}" * 5 + "{% endfor %}" * 5
    template = "{% if messages[0].content == 'go' %}" + endless + "{% endif %}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = json.dumps({"messages": USER}).encode()
    async with preparing(Config(model=ModelConfig(model=str(tmp_path)))) as preparer:
        assert await preparer.prepare(CHAT, chat)
        assert preparer.server_pid is None
        with pytest.raises(BadRequest, match="got what takes too much time"):
            await preparer.prepare(CHAT, chat.replace(b"hi", b"go"))
        assert any("the next go to workers" in message for message in caplog.messages)
        monkeypatch.setattr(Preparation, "run", None)  # of this process, which is not asked now
        assert await preparer.prepare(CHAT, chat)


WRONG: list[tuple[str, Any, str]] = [
    (CHAT, {"messages": [1] * 500_000}, r"messages\[0\]: expected an object, got 1"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "<|im_end|>" * 100_000}]},
        "prompt is too long: expected at most 4095 tokens",
    ),
    (COMPLETION, {"prompt": "ab " * 500_000}, "prompt is too long: expected at most 4095 tokens, .*, got at least"),
    (COMPLETION, {"prompt": [5] * 500_000}, "prompt is too long: expected at most"),
    (COMPLETION, {f"f{i}": 1 for i in range(100_000)}, f"body: expected at most {MAX_PARTS} objects, lists and fields"),
    (COMPLETION, {"prompt": [[]] * 500_000}, f"body: expected at most {MAX_PARTS} objects, lists and fields"),
    (COMPLETION, {"prompt": "a", "bad_words": ["x" * 900] * 256}, "bad_words: expected words of at most 8192 tokens"),
    (COMPLETION, {"prompt": "a", "model": "x" * 500_000}, "model: expected"),
]


@pytest.mark.parametrize(("task", "body", "message"), WRONG)
async def test_a_large_body_is_refused_with_the_field_at_fault(task: str, body: Any, message: str) -> None:
    async with preparing() as preparer:
        with pytest.raises(FdsdError, match=message) as caught:
            await preparer.prepare(task, json.dumps(body).encode())
        assert len(str(caught.value)) < 1000


async def test_a_schema_that_takes_too_long_to_compile_is_refused_by_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = replace(preparer_module.POOLS[0], limits=replace(preparer_module.POOLS[0].limits, cpu_s=1))
    monkeypatch.setattr(preparer_module, "POOLS", (rules,))
    schema = {"allOf": [{"type": "string", "pattern": f"[a-z]{{{i}}}x"} for i in range(1, 60)]}
    body = {"prompt": "a", "structured_outputs": {"json": schema}}
    async with preparing(Config(model=ModelConfig(model="demo"))) as preparer:
        with pytest.raises(BadRequest, match=r"^structured_outputs: .* takes too much time$") as caught:
            await preparer.prepare(COMPLETION, json.dumps(body).encode())
    assert caught.value.param == "structured_outputs"


async def test_bad_words_that_the_form_of_a_call_needs_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
    config = Config(model=ModelConfig(model="demo", tool_call_parser="hermes"))
    async with preparing(config) as preparer:
        assert await preparer.prepare(CHAT, json.dumps({**body, "bad_words": ["zebra"]}).encode())
        with pytest.raises(BadRequest, match=r"^bad_words: expected none that the form of the answer needs"):
            await preparer.prepare(CHAT, json.dumps({**body, "bad_words": ["<"]}).encode())


def test_prompts_behind_one_that_is_too_long_are_not_encoded() -> None:
    class Counting(PromptEncoder):
        num_encoded = 0

        def encode_text(
            self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = True
        ) -> list[int]:
            self.num_encoded += 1
            return super().encode_text(text, max_tokens, add_special_tokens=add_special_tokens)

    encoder = Counting(load_tokenizer(GOLDEN))
    body = {"prompt": ["a", "ab " * 5000, *["b"] * 100], "max_tokens": 1}
    error = Preparation(encoder, CONFIG, INFO).run(COMPLETION, Given(json.dumps(body).encode())).error
    assert error is not None
    assert "prompt is too long" in error.message
    assert encoder.num_encoded == 2


def workers_of(preparer: Preparer) -> list[int]:
    assert preparer.server_pid is not None
    children = Path(f"/proc/{preparer.server_pid}/task/{preparer.server_pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.mark.parametrize("size", SIZES)
async def test_a_body_whose_client_leaves_is_dropped_with_its_worker(size: int) -> None:
    async with preparing() as preparer:
        await preparer.prepare(COMPLETION, padded(SMALL, size))
        before = set(workers_of(preparer))
        text = {"messages": [{"role": "user", "content": "ab " * (size // 3)}]}
        task = asyncio.create_task(preparer.prepare(CHAT, json.dumps(text).encode()))
        await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BadRequest):
            await task
        assert await preparer.prepare(COMPLETION, padded(SMALL, size))
        while len(set(workers_of(preparer)) - before) > 1:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_at_the_end_does_not_kill_the_worker_of_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call, num_called = Worker.call, 0

    def call_counted(worker: Worker, name: str, payload: bytes) -> bytes:
        nonlocal num_called
        result = call(worker, name, payload)
        num_called += 1
        return result

    monkeypatch.setattr(Worker, "call", call_counted)
    async with preparing() as preparer:
        body = padded(SMALL, SIZES[0])
        await preparer.prepare(COMPLETION, body)
        [pool] = (pool for pool in preparer._pools if pool._idle)
        [worker] = pool._idle
        task = asyncio.create_task(preparer.prepare(COMPLETION, body))
        while not pool._num_bodies:
            await asyncio.sleep(0)
        while num_called < 2 or pool._idle != [worker]:  # until it is given back, which this event loop is not told
            time.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await preparer.prepare(COMPLETION, body)
        assert pool._idle == [worker]
        assert "its body goes to another one" not in caplog.text


async def test_killed_processes_are_replaced_and_no_body_fails_with_them(caplog: pytest.LogCaptureFixture) -> None:
    async with preparing() as preparer:
        body = padded(SMALL, SIZES[0])
        await preparer.prepare(COMPLETION, body)
        [worker] = (worker for pool in preparer._pools for worker in pool._idle)
        os.kill(worker.pid, signal.SIGKILL)
        assert await preparer.prepare(COMPLETION, body)
        assert "a worker ended (killed by SIGKILL): its body goes to another one" in caplog.messages
        assert preparer.server_pid is not None
        os.kill(preparer.server_pid, signal.SIGKILL)
        assert await preparer.prepare(COMPLETION, body)


async def test_closing_ends_what_is_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    call, num_stopped = Worker.call, 0

    def call_stopped(worker: Worker, name: str, payload: bytes) -> bytes:
        nonlocal num_stopped
        os.kill(worker.pid, signal.SIGSTOP)  # or it might be ready before it is closed
        num_stopped += 1
        return call(worker, name, payload)

    monkeypatch.setattr(Worker, "call", call_stopped)
    async with preparing() as preparer:
        body = json.dumps({"prompt": [[5] * 4000] * 100}).encode()
        tasks = [asyncio.create_task(preparer.prepare(COMPLETION, body)) for _ in range(5)]
        while num_stopped < POOLS[-1].max_workers:  # the others wait for these
            await asyncio.sleep(0.01)
        preparer.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Unavailable)


def test_what_stands_in_a_text_is_no_part() -> None:
    verify_shape(json.dumps({"prompt": '{"a":[1]}' * MAX_PARTS}).encode())
    verify_shape(b"[" * MAX_PARTS)
    with pytest.raises(BadRequest, match="got more"):
        verify_shape(b"[" * (MAX_PARTS + 1))
    with pytest.raises(BadRequest, match="got more"):
        verify_shape(b'{"a":1}' * MAX_PARTS)
