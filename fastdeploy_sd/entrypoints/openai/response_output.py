"""The items of a Response's output, and the events of a stream that tell how they grow.

An item begins with its first text and ends where the next begins or the answer ends; an answer without any text is an
empty message. What the items are depends on the text only, so a stream that goes on elsewhere is fed the shown text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from fastdeploy_sd.text.answer_parts import AnswerPart, Content, Reasoning, ToolCallDelta, tool_call_id

COMPLETED, IN_PROGRESS = "completed", "in_progress"
Json = dict[str, Any]
Event = tuple[str, Json]


class ResponseOutput:
    """The items of a Response's output so far; their ids are made from the job's."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._items: list[_Item] = []

    def add(self, part: AnswerPart, logprobs: Sequence[Json] = ()) -> list[Event]:
        """Take a part of the answer and its logprobs; return the name and the values of each event that it adds."""
        events: list[Event] = []
        if not (self._items and self._items[-1].takes(part)):
            if self._items:
                events += self._items[-1].close(COMPLETED)
            events += self._open(part)
        return events + self._items[-1].add(part, logprobs)

    def end(self, status: str) -> list[Event]:
        """End the answer, and its last item with this status; return the events."""
        opening = [] if self._items else self._open(Content(""))
        return opening + self._items[-1].close(status)

    def values(self) -> list[dict[str, Any]]:
        """Return the items as a Response holds them."""
        return [item.value() for item in self._items]

    def _open(self, part: AnswerPart) -> list[Event]:
        index, base = len(self._items), self._job_id.removeprefix("resp_")
        item_id = base if index == 0 else f"{base}_{index}"
        item: _Item
        match part:
            case ToolCallDelta(call, name):
                item = _Call(index, "fc_" + item_id, tool_call_id(self._job_id, 0, call), name or "", call)
            case Reasoning():
                item = _Thought(index, "rs_" + item_id)
            case _:
                item = _Message(index, "msg_" + item_id)
        self._items.append(item)
        return item.open()


class _Item(ABC):
    """An item of the output at its place."""

    def __init__(self, output_index: int, item_id: str) -> None:
        self._index = output_index
        self._id = item_id
        self._texts: list[str] = []
        self._status = IN_PROGRESS

    @abstractmethod
    def takes(self, part: AnswerPart) -> bool:
        """Whether a part belongs to this item."""

    @abstractmethod
    def add(self, part: AnswerPart, logprobs: Sequence[Json]) -> list[Event]:
        """Take a part."""

    @abstractmethod
    def value(self) -> dict[str, Any]:
        """Return the item."""

    def open(self) -> list[Event]:
        """Return the events of its beginning."""
        return [("response.output_item.added", {"output_index": self._index, "item": self.value()})]

    def close(self, status: str) -> list[Event]:
        """End it."""
        self._status = status
        return [("response.output_item.done", {"output_index": self._index, "item": self.value()})]

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}


class _TextItem(_Item):
    """An item of one part, a text; its kind is also in the names of its events."""

    kind: ClassVar[str]

    def add(self, part: AnswerPart, logprobs: Sequence[Json]) -> list[Event]:
        assert isinstance(part, Content | Reasoning)
        self._texts.append(part.text)
        return [(f"response.{self.kind}.delta", self._part_place | {"delta": part.text})]

    def open(self) -> list[Event]:
        return [*super().open(), ("response.content_part.added", self._part_place | {"part": self._part("")})]

    def close(self, status: str) -> list[Event]:
        text = self._text
        return [
            (f"response.{self.kind}.done", self._part_place | {"text": text}),
            ("response.content_part.done", self._part_place | {"part": self._part(text)}),
            *super().close(status),
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.kind, "text": text}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [] if self._status == IN_PROGRESS else [self._part(self._text)]

    @property
    def _part_place(self) -> dict[str, Any]:
        return self._place | {"content_index": 0}


class _Message(_TextItem):
    """What the model says."""

    kind = "output_text"

    def __init__(self, output_index: int, item_id: str) -> None:
        super().__init__(output_index, item_id)
        self._logprobs: list[Json] = []

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(part, Content)

    def add(self, part: AnswerPart, logprobs: Sequence[Json]) -> list[Event]:
        self._logprobs += logprobs
        [(name, values)] = super().add(part, logprobs)
        return [(name, values | {"logprobs": list(logprobs)})]

    def close(self, status: str) -> list[Event]:
        (name, values), *others = super().close(status)
        return [(name, values | {"logprobs": self._logprobs}), *others]

    def _part(self, text: str) -> dict[str, Any]:
        return super()._part(text) | {"annotations": [], "logprobs": list(self._logprobs)}

    def value(self) -> dict[str, Any]:
        of_message = {"type": "message", "role": "assistant"}
        return {"id": self._id, **of_message, "status": self._status, "content": self._content}


class _Thought(_TextItem):
    """What the model thought before; it has no summary."""

    kind = "reasoning_text"

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(part, Reasoning)

    def value(self) -> dict[str, Any]:
        of_thought: dict[str, Any] = {"type": "reasoning", "summary": []}
        return {"id": self._id, **of_thought, "status": self._status, "content": self._content}


class _Call(_Item):
    """A function that the model calls."""

    def __init__(self, output_index: int, item_id: str, call_id: str, name: str, call: int) -> None:
        super().__init__(output_index, item_id)
        self._call_id = call_id
        self._name = name
        self._call = call

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(part, ToolCallDelta) and part.index == self._call

    def add(self, part: AnswerPart, logprobs: Sequence[Json]) -> list[Event]:
        assert isinstance(part, ToolCallDelta)
        if not part.arguments:
            return []
        self._texts.append(part.arguments)
        return [("response.function_call_arguments.delta", self._place | {"delta": part.arguments})]

    def value(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._text,
        }

    def close(self, status: str) -> list[Event]:
        values = self._place | {"name": self._name, "arguments": self._text}
        return [("response.function_call_arguments.done", values), *super().close(status)]
