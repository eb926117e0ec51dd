"""Renders a chat template in a sandbox, for callers that are not under limits themselves, such as the offline API."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.process.sandbox import Sandbox, Worker, WorkerEndedError
from fastdeploy_sd.process.sandbox_worker import Handle, Note, Setup, WorkerLimits
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.chat_template import ChatTemplate, Json, Message, PromptEnd

LIMITS = WorkerLimits(nice=0, memory_bytes=2 << 30, cpu_s=60)
_LOADER = "fastdeploy_sd.text.template_process:load"


class TemplateProcess:
    """A ChatTemplate that a worker renders; the same arguments and errors. The first rendering starts the process."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        arguments = source, dict(special_tokens), list(control_tokens)
        ChatTemplate(*arguments)
        self._sandbox = Sandbox(_LOADER, "template", json.dumps(arguments))
        self._idle: list[Worker] = []
        weakref.finalize(self, _close, self._sandbox, self._idle)

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Json],
        max_control_tokens: int | None = None,
        tools: Sequence[Mapping[str, Json]] = (),
        end: PromptEnd = PromptEnd.TURN,
    ) -> tuple[Segment, ...]:
        """Return the prompt as ChatTemplate.render does; raises BadRequest too where that takes more than it may."""
        try:
            call = json.dumps([[asdict(m) for m in messages], kwargs, max_control_tokens, tools, end]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: expected JSON values, got {error!s:.200}", param="messages") from None
        try:
            answer = json.loads(self._call(call))
        except WorkerEndedError:
            raise BadRequest(
                f"messages: expected a chat template that renders them in {LIMITS.cpu_s} s and"
                f" {LIMITS.memory_bytes >> 30} GiB, got one that takes more",
                param="messages",
            ) from None
        if "error" in answer:
            raise BadRequest(answer["error"], param=answer["param"], code=answer["code"])
        return tuple(Segment(*segment) for segment in answer["segments"])

    def _call(self, call: bytes) -> bytes:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._sandbox.fork(LIMITS)
        try:
            result = worker.call("render", call)
        except BaseException:  # Ctrl-C too: its answer would be taken for that of the next call
            worker.close()
            raise
        self._idle.append(worker)
        return result


def _close(sandbox: Sandbox, idle: list[Worker]) -> None:
    sandbox.close()
    for worker in idle:
        worker.close()


def load(config: str) -> Setup:
    """Compile the template that workers share; see `sandbox_worker.Loader`."""
    template = ChatTemplate(*json.loads(config))

    def setup(first: bytes, note: Note) -> Handle:
        return lambda name, call: json.dumps(_answer(template, json.loads(call))).encode()

    return setup


def _answer(template: ChatTemplate, call: Any) -> dict[str, Any]:
    messages, kwargs, max_control_tokens, tools, end = call
    try:
        turns = [Message(**message) for message in messages]
        segments = template.render(turns, kwargs, max_control_tokens, tools, PromptEnd(end))
        return {"segments": [(segment.text, segment.is_control) for segment in segments]}
    except BadRequest as error:
        return {"error": error.message, "param": error.param, "code": error.code}
