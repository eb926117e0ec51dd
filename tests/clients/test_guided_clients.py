"""Tools and schemas through real clients: what they get is a call or an object that their own types take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments
from tests.clients.programs.conversation import MODEL
from tests.clients.programs.guided import EVENT_QUESTION, MAX_TOKENS, WEATHER_QUESTION, WEATHER_TOOL
from tests.clients.test_clients import PROGRAMS, python, run
from tests.e2e.server_process import running_server

pytestmark = pytest.mark.long

# Program, the environment it runs in ("" = that of the tests), and how many calls and objects it reports.
PYTHON_PROGRAMS = [
    ("openai_tools.py", "", 8),
    ("openai_tools.py", "openai2", 8),
    ("litellm_tools.py", "openai2", 6),
    ("instructor_tools.py", "openai2", 3),
    ("langchain_tools.py", "openai3", 4),
    ("pydantic_ai_tools.py", "openai3", 5),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server("--model", MODEL, "--num-threads", "1", "--kv-cache-memory-gb", "0.1") as server:
        yield server.url
        assert server.stop() == 0


def verify(found: dict[str, Any], count: int) -> None:
    """A stream comes to what the whole answer is; a schema is the same by every route."""
    assert len(found) == count, found
    streamed = {name.removeprefix("streamed "): value for name, value in found.items() if name.startswith("streamed ")}
    assert streamed == {name: found[name] for name in streamed}
    assert all(value[0] == "get_weather" for name, value in found.items() if "call" in name and isinstance(value, list))


@pytest.mark.parametrize(("program", "environment", "count"), PYTHON_PROGRAMS, ids=lambda value: value or "tests' own")
def test_python_clients(url: str, program: str, environment: str, count: int) -> None:
    verify(run([python(environment), program, url]), count)


def test_the_npm_client(url: str) -> None:
    node, folder = environments.node_packages(Path(python("openai3")))
    shutil.copy(PROGRAMS / "openai_tools.mjs", folder)  # packages are looked for beside the program
    question = [url, MODEL, WEATHER_QUESTION, EVENT_QUESTION, str(MAX_TOKENS), json.dumps(WEATHER_TOOL)]
    verify(run([str(node), "openai_tools.mjs", *question], folder), 6)


def test_the_recipe_of_an_agent(url: str) -> None:
    recipe = (environments.HERE.parents[1] / "docs" / "recipes.md").read_text()
    program = recipe.split("<<'END'\n")[1].split("END\n")[0].replace("http://localhost:8000", url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    call, *answer = done.stdout.splitlines()
    assert re.fullmatch(r"multiply\(\{'a': \d+, 'b': \d+\}\) = \d+", call)
    assert answer
