"""Guided answers of a real server, by every name that a client may use; what cannot be kept is a 400."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from fastdeploy_sd import LLM, SamplingParams
from fastdeploy_sd.errors import BadRequest
from tests.server.test_api_e2e import GOLDEN, RunningServer

pytestmark = pytest.mark.slow

NAME = "qwen3-tiny"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": PERSON, "strict": True}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, ""),
    ({"structured_outputs": {"json": PERSON, "whitespace_pattern": " ?"}}, ""),
    ({"guided_json": json.dumps(PERSON)}, ""),
    ({"guided_regex": "[a-c]{3,5}-[0-9]+x"}, "[a-c]{3,5}-[0-9]+x"),
    ({"structured_outputs": {"choice": ["yes", "not at all"]}}, "yes|not at all"),
    ({"guided_grammar": 'root ::= "<" [a-z] ("," [a-z])? ">"'}, "<[a-z](,[a-z])?>"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(NAME, {"max-num-seqs": "8"})
    yield running
    assert running.stop() == 0


def verify(text: str, pattern: str) -> None:
    if pattern:
        assert re.fullmatch(pattern, text), text
    else:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda value: next(iter(value)) if value else "")
def test_answers_have_the_form(server: RunningServer, form: dict[str, Any], pattern: str) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 120, "n": 3, "temperature": 1, "seed": 5}
    body |= form
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    finished = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert finished, answer
    for choice in finished:
        verify(choice["message"]["content"], pattern)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}, timeout=120) as lines:
        texts = ["", "", ""]
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


def test_a_stop_string_ends_each_choice_where_its_text_has_it(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": "go", "max_tokens": 120, "n": 3, "seed": 5, "guided_json": PERSON, "stop": []}
    whole, cut = (
        httpx.post(f"{server.url}/v1/completions", json=body | stop, timeout=120).json()["choices"]
        for stop in ({}, {"stop": ['"age"']})
    )
    assert any(choice["stop_reason"] == '"age"' for choice in cut)
    assert [choice["text"] for choice in cut] == [choice["text"].split('"age"')[0] for choice in whole]


def test_a_response_has_the_form_too(server: RunningServer) -> None:
    form: Any = {"format": {"type": "json_schema", **NAMED}}
    answer = server.api.responses.create(model=NAME, input="go", text=form, max_output_tokens=200)
    assert answer.status == "completed"
    verify(answer.output_text, "")
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.to_dict() == form["format"]


@pytest.mark.parametrize("extra", [{}, {"disable_additional_properties": True}])
def test_answers_have_no_keys_that_nobody_asked_for(server: RunningServer, extra: dict[str, Any]) -> None:
    schema = {name: value for name, value in PERSON.items() if name != "additionalProperties"}
    body = {"prompt": "x", "n": 8, "seed": 1, "temperature": 2, "max_tokens": 90}
    fields: dict[str, Any] = {"structured_outputs": {"json": schema} | extra}
    choices = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=120).json()["choices"]
    ended = [json.loads(choice["text"]) for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert {tuple(value) for value in ended} == {("name", "age")}


def test_a_wrong_grammar_is_refused_and_the_others_go_on(server: RunningServer) -> None:
    async def run() -> list[Any]:
        api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with api:
            right: Any = {"guided_regex": "[ab]{5}"}
            bombs: list[Any] = [
                {"guided_json": {"type": "integer", "multipleOf": 99999989}},
                {"guided_regex": "(ab){1000000}"},
                {"guided_grammar": "start: A\nA: " + " & ".join(f"/(.*{c}.*){{30}}/" for c in "abcd")},
                {"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(450))},
                {"guided_grammar": "start: " + "(" * 15_000},
            ]
            asks = [api.completions.create(model=NAME, prompt="x", extra_body=e) for e in [*bombs, right, right]]
            return await asyncio.gather(*asks, return_exceptions=True)

    *refused, first, second = asyncio.run(run())
    assert [type(error) for error in refused] == [openai.BadRequestError] * 5, refused
    for answer in (first, second):
        verify(answer.choices[0].text, "[ab]{5}")


def test_it_is_counted(server: RunningServer) -> None:
    for _ in range(2):
        server.api.completions.create(model=NAME, prompt="x", extra_body={"guided_regex": "counted [0-9]"})
    metrics = httpx.get(f"{server.url}/metrics").text
    values = dict(re.findall(r"^fastdeploy_sd:(grammars_\w+_total|num_grammars) ([0-9.]+)$", metrics, re.MULTILINE))
    assert float(values["grammars_compiled_total"]) >= 1
    assert float(values["grammars_reused_total"]) >= 1
    assert float(values["num_grammars"]) >= 1


def test_offline() -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=150, logprobs=2)
    with LLM(str(GOLDEN / NAME), dtype="float32", kv_cache_memory_gb=0.01) as llm:
        outputs = llm.generate(["a", "b"], params, structured_outputs={"json": PERSON}, use_tqdm=False)
        for output in outputs:
            verify(output.outputs[0].text, "")
        [drafting, plain] = (
            [
                (output.outputs[0].token_ids, output.outputs[0].logprobs)
                for output in llm.generate(
                    ["a", "b"], params, structured_outputs={"json": PERSON}, speculation=speculation, use_tqdm=False
                )
            ]
            for speculation in ({"method": "ngram", "num_speculative_tokens": 8}, {"enabled": False})
        )
        assert drafting == plain == [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
        metrics = outputs[0].outputs[0].metrics
        assert metrics is not None
        assert sum(metrics.drafts.accepted) > 5
        mixed = llm.generate(["a", "b"], params, structured_outputs=[None, {"choice": ["x", "y"]}], use_tqdm=False)
        assert mixed[1].outputs[0].text in "xy"
        wrong: list[tuple[Any, SamplingParams, str]] = [
            ({"regex": "("}, params, "structured_outputs: expected what can be compiled"),
            ({"json": {}, "regex": "a"}, params, "structured_outputs: expected exactly one of"),
            ({"regex": "a"}, SamplingParams(ignore_eos=True), "ignore_eos: expected false with a grammar"),
            ([None], params, "structured_outputs: expected StructuredOutputs, or one or None for each of 2"),
        ]
        for given, sampling, message in wrong:
            with pytest.raises(BadRequest, match=re.escape(message)):
                llm.generate(["a", "b"], sampling, structured_outputs=given, use_tqdm=False)
