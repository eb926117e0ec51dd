"""Renders a chat template in a process of its own, so that a hostile one costs no more than the process may take.

For callers that are not under limits themselves, as the server's workers are. The process is started by the first
rendering, has bounded memory and bounded processor time per rendering, and ends with its owner; one that passes a limit
is replaced by the next rendering. Knows nothing of templates but how to call them.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.chat_template import ChatTemplate, Json, Message, PromptEnd

MEMORY_BYTES = 2 << 30
CPU_S = 60
_PROGRAM = "from fastdeploy_sd.text.template_process import main; main()"


class TemplateProcess:
    """A ChatTemplate that is rendered elsewhere; the same arguments and errors.

    Raises:
        CheckpointError: the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        self._start = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "control_tokens": list(control_tokens),
            "memory_bytes": MEMORY_BYTES,
            "cpu_s": CPU_S,
        }
        ChatTemplate(source, special_tokens, self._start["control_tokens"])  # type: ignore[arg-type]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return None if self._process is None else self._process.pid

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Json],
        max_control_tokens: int | None = None,
        tools: Sequence[Mapping[str, Json]] = (),
        end: PromptEnd = PromptEnd.TURN,
    ) -> tuple[Segment, ...]:
        """Return the prompt of a conversation, see ChatTemplate.render.

        Raises:
            BadRequest: as there, or the template takes more memory or time than it may.
        """
        call = {
            "messages": [asdict(message) for message in messages],
            "kwargs": kwargs,
            "max_control_tokens": max_control_tokens,
            "tools": tools,
            "end": end,
        }
        try:
            line = json.dumps(call).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: expected JSON values, got {error!s:.200}", param="messages") from None
        with self._lock:
            answer = self._ask(line)
        if answer is None:
            raise BadRequest(
                f"messages: expected a chat template that renders them in {CPU_S} s and {MEMORY_BYTES >> 30} GiB, got"
                " one that takes more",
                param="messages",
            )
        if "error" in answer:
            raise BadRequest(answer["error"], param=answer["param"], code=answer["code"])
        return tuple(Segment(*segment) for segment in answer["segments"])

    def _ask(self, call: bytes) -> dict[str, Any] | None:
        """Return the answer, None when the process ended over the call."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(call)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            _end(process)
            self._process = None
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # Not in our group of processes: Ctrl-C is for us. It ends when its input does.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            weakref.finalize(self, _end, self._process)
            assert self._process.stdin is not None
            _write(self._process.stdin, self._start)
        return self._process


def _write(stream: Any, value: object) -> None:
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Entry point of the process: one JSON object per line, the start first, then call and answer in turn."""
    start = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (start["memory_bytes"],) * 2)
    template = ChatTemplate(start["source"], start["special_tokens"], start["control_tokens"])
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + start["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        _write(sys.stdout.buffer, _answer(template, json.loads(line)))


def _answer(template: ChatTemplate, call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        messages = [Message(**message) for message in call["messages"]]
        segments = template.render(
            messages, call["kwargs"], call["max_control_tokens"], call["tools"], PromptEnd(call["end"])
        )
        return {"segments": [(segment.text, segment.is_control) for segment in segments]}
    except BadRequest as error:
        return {"error": error.message, "param": error.param, "code": error.code}
