"""`return_token_sources`: who guessed each token, streamed and whole, of every kind of source; the bytes stay."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_sd import LLM, SamplingParams
from tests.e2e.server_process import ServerProcess, running_server
from tests.server.test_api import CHAT, COMPLETION, post_stream
from tests.server.test_speculation import ASK, K, ScoredOracleProposer, executor
from tests.server.toy_server import TOKENIZER, post, serve

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
CODE = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(a"
SCHEMA = {"type": "object", "properties": {"long_name": {"const": "value"}}, "required": ["long_name"]}


def runs_of(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for step in steps for run in step["runs"]]


def tokens_by_source(steps: list[dict[str, Any]]) -> Counter[str]:
    counts = Counter[str]()
    for run in runs_of(steps):
        counts[run["source"]] += run["num_tokens"]
    return counts


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_every_step_tells_its_sources(path: str) -> None:
    """One token of the prompt's step, then steps of three drafts, one of which another method has added."""
    silent_ask = ASK | {"max_tokens": 9, "return_token_ids": True}
    ask = silent_ask | {"return_token_sources": True}
    async with serve(executor=executor(ScoredOracleProposer)) as served:
        [whole] = (await post(served, path, ask))["choices"]
        streamed = [chunk["choices"][0] for chunk in await post_stream(served, path, ask)]
        [silent] = (await post(served, path, silent_ask))["choices"]
    steps = whole.pop("token_sources")
    assert whole == silent
    assert [[(run["source"], run["num_tokens"]) for run in step["runs"]] for step in steps] == [
        [("target", 1)], *[[("mtp", 2), ("ngram", 1), ("target", 1)]] * 2
    ]  # fmt: skip
    assert [step["drafted"] for step in steps] == [{}, *[{"mtp": 2, "ngram": 1}] * 2]
    texts = [run["text"] for run in runs_of(steps)]
    assert "".join(texts) == (whole["message"]["content"] if path == CHAT else whole["text"])
    bounds = [0, 1, 3, 4, 5, 7, 8, 9]
    ids = whole["token_ids"]
    assert texts == [TOKENIZER.decode(ids[a:b], skip_hidden=True) for a, b in pairwise(bounds)]
    assert [step for part in streamed for step in part.get("token_sources", [])] == steps


async def test_a_stop_text_cuts_the_sources_too_and_a_plain_server_has_only_the_target() -> None:
    ask = ASK | {"return_token_sources": True}
    async with serve(executor=executor(ScoredOracleProposer)) as served, serve() as plain:
        [choice] = (await post(plain, COMPLETION, ask))["choices"]
        assert tokens_by_source(choice["token_sources"]) == {"target": ASK["max_tokens"]}
        stop = choice["text"][20:24]
        end = choice["text"].index(stop) + len(stop)
        [cut] = (await post(served, COMPLETION, ask | {"stop": stop, "include_stop_str_in_output": True}))["choices"]
    told = "".join(run["text"] for run in runs_of(cut["token_sources"]))
    assert told.startswith(choice["text"][:end])
    assert max(step["drafted"].get("mtp", 0) + step["drafted"].get("ngram", 0) for step in cut["token_sources"]) == K


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 4})
    with running_server("--model", "demo", "--num-threads", "1", "--speculative-config", config) as running:
        yield running


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("mtp", {}),
        ("ngram", {"speculation": {"method": "ngram"}}),
        ("suffix", {"speculation": {"method": "suffix"}}),
        ("prediction", {"speculation": {"method": "ngram"}, "prediction": {"type": "content", "content": CODE}}),
        ("grammar", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    ],
)
def test_of_real_drafts(server: ServerProcess, source: str, more: dict[str, Any]) -> None:
    ask = {"messages": [{"role": "user", "content": CODE}], "temperature": 0, "max_tokens": 40} | more
    asking = ask | {"return_token_sources": True}
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        [silent] = http.post(CHAT, json=ask).json()["choices"]
        [whole] = http.post(CHAT, json=asking).json()["choices"]
        lines = http.post(CHAT, json=asking | {"stream": True}).text.split("\n\n")
    assert whole["message"] == silent["message"]
    streamed = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    steps = [step for choice in streamed for step in choice.get("token_sources", [])]
    for found, metrics in ((whole["token_sources"], whole), (steps, streamed[-1])):
        counts = tokens_by_source(found)
        assert counts[source] > 0
        assert counts - Counter(target=counts["target"]) == metrics["speculate_metrics"]["accepted_by_source"]
        assert "".join(run["text"] for run in runs_of(found)).startswith(silent["message"]["content"])


def test_of_a_draft_model_offline(golden_dir: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    folder = str(golden_dir / "qwen3-tiny")
    with LLM(model=folder, speculative_config={"method": "draft_model", "model": folder}) as llm:
        [result] = llm.generate([CODE], params, speculation={"token_sources": True})
        [silent] = llm.generate([CODE], params)
    [completion] = result.outputs
    assert completion.token_ids == silent.outputs[0].token_ids
    assert silent.outputs[0].token_sources is None
    steps = completion.token_sources or ()
    assert sum(run.num_tokens for step in steps for run in step.runs) == 12
    assert {run.source for step in steps for run in step.runs} == {"draft_model", "target"}
    assert "".join(run.text for step in steps for run in step.runs) == completion.text
