"""Two turns, a stream and the list of models through real clients; what they get is what a plain request gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import environments
from tests.clients.programs.conversation import FIRST, MAX_TOKENS, MODEL, OVERFLOWS, SECOND, STOP
from tests.e2e.server_process import running_server

pytestmark = pytest.mark.long

PROGRAMS = environments.HERE / "programs"
PROGRAM_TIMEOUT_S = 300
# Program -> the environment it runs in; "" = the one of the tests, which has another version of the package.
PYTHON_PROGRAMS = [
    ("openai_client.py", ""),
    ("openai_client.py", "openai2"),
    ("litellm_client.py", "openai2"),
    ("langchain_client.py", "openai3"),
    ("pydantic_ai_client.py", "openai3"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server("--model", MODEL, "--num-threads", "1", "--kv-cache-memory-gb", "0.1") as server:
        yield server.url
        assert server.stop() == 0


def run(command: list[str], folder: Path = PROGRAMS) -> dict[str, Any]:
    """The report of a program."""
    quiet = {"DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    kept = {name: value for name, value in os.environ.items() if "OPENAI" not in name and not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=kept | quiet, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def python(environment: str) -> str:
    return str(environments.python_with(environment)) if environment else sys.executable


def plain_answer(url: str, messages: list[dict[str, Any]]) -> str:
    """What a request without any client's additions gets."""
    body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, "stop": STOP}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def verify(url: str, report: dict[str, Any]) -> None:
    """The second turn's prompt held the first answer: its text and its length are those of the whole conversation."""
    question = {"role": "user", "content": FIRST}
    first = plain_answer(url, [question])
    assert report["first"] == report["streamed"] == first
    conversation = [question, {"role": "assistant", "content": first}, {"role": "user", "content": SECOND}]
    second = plain_answer(url, conversation)
    assert second != plain_answer(url, conversation[2:]), "the history must matter, or it proves nothing"
    assert report["seconds"] == dict.fromkeys(report["seconds"], second)
    assert report["seconds"]
    tokens = httpx.post(f"{url}/tokenize", json={"messages": conversation}, timeout=60).raise_for_status().json()
    assert report["usage"] == dict.fromkeys(report["usage"], tokens["count"])
    assert report.get("models", [MODEL]) == [MODEL]
    assert report.get("num_overflows", 2 * len(OVERFLOWS)) == 2 * len(OVERFLOWS)


@pytest.mark.parametrize(("program", "environment"), PYTHON_PROGRAMS, ids=lambda value: value or "tests' own")
def test_python_clients(url: str, program: str, environment: str) -> None:
    verify(url, run([python(environment), program, url]))


def test_the_npm_client(url: str) -> None:
    node, folder = environments.node_packages(Path(python("openai3")))
    shutil.copy(PROGRAMS / "openai_client.mjs", folder)  # packages are looked for beside the program
    verify(url, run([str(node), "openai_client.mjs", url, MODEL, FIRST, SECOND, str(MAX_TOKENS), STOP], folder))


def test_instructor_asks_again_with_the_answer_it_got(url: str) -> None:
    report = run([python("openai2"), "instructor_client.py", url])
    attempts = report["attempts"]
    assert len(attempts) == 2, report
    for attempt in attempts:
        assert attempt["answer"] == plain_answer(url, attempt["messages"])
    assert attempts[0]["answer"] in json.dumps([m.get("content") for m in attempts[1]["messages"]], ensure_ascii=False)
