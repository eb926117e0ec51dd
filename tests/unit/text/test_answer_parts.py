"""Parts of an answer: they are joined by kind for a chat completion, and become items in order for a Response."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.entrypoints.openai.response_output import COMPLETED, ResponseOutput
from fastdeploy_sd.text.answer_parser import AnswerParser
from fastdeploy_sd.text.answer_parts import (
    AnswerPart,
    Content,
    PartsDelta,
    Reasoning,
    ToolCallDelta,
    tool_call_id,
)

PARTS: list[AnswerPart] = [
    Content("I "),
    Content("look."),
    ToolCallDelta(0, "get", ""),
    ToolCallDelta(0, None, '{"a": '),
    ToolCallDelta(0, None, "1}"),
    ToolCallDelta(1, "put", "{}"),
    Content("Done."),
]


def test_parts_are_joined_by_kind() -> None:
    calls = (ToolCallDelta(0, "get", '{"a": 1}'), ToolCallDelta(1, "put", "{}"))
    assert PartsDelta.of([Reasoning("hm"), *PARTS]) == PartsDelta("hm", "I look.Done.", calls)
    assert PartsDelta.of([]).is_empty
    assert not PartsDelta.of([ToolCallDelta(0, "get", "")]).is_empty


def test_without_parsers_text_is_content() -> None:
    parser = AnswerParser()
    assert parser.push("<tool_call>") + parser.push("") + parser.finish() == [Content("<tool_call>")]


def test_the_id_of_a_call_follows_from_its_place() -> None:
    places = [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)]
    ids = [tool_call_id(*place) for place in places]
    assert len({*ids}) == len(ids)
    assert ids[0] == tool_call_id("a", 0, 0)
    assert all(i.startswith("call_") and len(i) == 29 for i in ids)


def test_parts_become_items_in_order() -> None:
    output = ResponseOutput("resp_x")
    events = [event for part in PARTS for event in output.add(part)] + output.end(COMPLETED)
    items = output.values()
    assert [(i["type"], i["status"]) for i in items] == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
        ("message", "completed"),
    ]
    assert [i["arguments"] for i in items[1:3]] == ['{"a": 1}', "{}"]
    assert [i["call_id"] for i in items[1:3]] == [tool_call_id("resp_x", 0, i) for i in (0, 1)]
    assert len({i["id"] for i in items}) == 4
    assert _replayed(events) == items
    assert [name for name, values in events if values["output_index"] == 1] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]


def test_an_answer_without_text_is_an_empty_message_and_a_cut_one_is_incomplete() -> None:
    output = ResponseOutput("resp_x")
    output.end(COMPLETED)
    [item] = output.values()
    assert (item["content"][0]["text"], item["status"]) == ("", "completed")
    output = ResponseOutput("resp_x")
    output.add(Content("I"))
    output.add(ToolCallDelta(0, "get", '{"a'))
    output.end("incomplete")
    assert [item["status"] for item in output.values()] == ["completed", "incomplete"]


def _replayed(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The items as a client puts them together from deltas, checked against what the last event of each says."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for name, values in events:
        place = values["output_index"]
        if name.endswith("item.added"):
            assert place == len(items)
            items.append(values["item"])
            texts.append("")
        elif name.endswith(".delta"):
            assert values["item_id"] == items[place]["id"]
            texts[place] += values["delta"]
        elif name.endswith("item.done"):
            items[place] = values["item"]
            done = items[place]
            assert texts[place] == (done["arguments"] if "arguments" in done else done["content"][0]["text"])
    return items
