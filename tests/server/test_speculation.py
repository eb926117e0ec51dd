"""Speculation over HTTP: only speed and reports change, and what a body asks for is honoured or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import DraftTokens, LogprobArrays, SpeculationInfo
from tests.doubles.proposers import Continuations, OracleProposer, RandomLengthProposer, WrongProposer
from tests.doubles.toy_executor import ToyExecutor
from tests.server.test_api import CHAT, COMPLETION, post_stream
from tests.server.toy_server import INFO, MODEL, TOKENIZER, Served, post, serve, server_config, toy_tokens

pytestmark = pytest.mark.slow

K = 3
SPECULATION = SpeculationInfo("mtp", ("naive", "ngram", "mtp"), K, has_draft_logprobs=True)
PROMPT = [5, 6, 7]
TOKENS = toy_tokens(PROMPT, 60)
ASK: dict[str, Any] = {"prompt_token_ids": PROMPT, "max_tokens": 24, "temperature": 0, "request_id": "r"}
CONTINUATIONS: Continuations = dict.fromkeys(("r", "r-0", "r-1"), PROMPT + TOKENS)


class ScoredOracleProposer(OracleProposer):
    """Always right, and says how sure it is: -0.5 for its first draft, -1 for the second, and so on."""

    def propose(self, x: ProposeInput) -> DraftTokens:
        drafts = super().propose(x)
        positions = np.concatenate([np.arange(n) for n in np.diff(drafts.cu_num_draft)])
        logprobs = (-0.5 * (positions + 1)).astype(np.float32)
        best = np.repeat(drafts.token_ids[:, None], 20, axis=1)
        scores = LogprobArrays(logprobs, np.ones(len(best), np.int32), best, np.repeat(logprobs[:, None], 20, axis=1))
        return replace(drafts, logprobs=scores)


def executor(make: Callable[[Continuations, int], Any], speculation: SpeculationInfo = SPECULATION) -> ToyExecutor:
    info = replace(INFO, speculation=speculation)
    return ToyExecutor(info, make(CONTINUATIONS, INFO.vocab_size))


@pytest.fixture
async def served() -> Any:
    async with serve(executor=executor(ScoredOracleProposer)) as s:
        yield s


def without_report(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as a plain server gives it, and without the time it was made."""
    choices = [{k: v for k, v in choice.items() if k != "speculate_metrics"} for choice in answer["choices"]]
    return {**answer, "choices": choices, "created": 0}


ASKS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"stop": TOKENIZER.decode(TOKENS[10:13], skip_hidden=True), "return_token_ids": True}),
    (COMPLETION, {"n": 2, "logprobs": 3}),
    (COMPLETION, {"stop_token_ids": [TOKENS[11]], "include_stop_str_in_output": True}),
    (COMPLETION, {"max_tokens": 1}),
]


@pytest.mark.parametrize("make", [ScoredOracleProposer, WrongProposer, RandomLengthProposer])
async def test_answers_are_those_of_a_plain_server(make: Callable[[Continuations, int], Any]) -> None:
    async with serve() as plain, serve(executor=executor(make)) as speculating:
        for path, options in ASKS:
            expected = await post(plain, path, ASK | options)
            answer = await post(speculating, path, ASK | options)
            assert all("speculate_metrics" not in choice for choice in expected["choices"])
            assert all(choice["speculate_metrics"]["method"] == "mtp" for choice in answer["choices"])
            assert without_report(answer) == without_report(expected)


async def test_metrics_count_drafts(served: Served) -> None:
    [choice] = (await post(served, COMPLETION, ASK | {"max_tokens": 9}))["choices"]
    expected = {
        "accepted_tokens": 6, "rejected_tokens": 0, "accept_ratio": 1.0, "average_accept_length": 4.0,
        "accepted_tokens_per_head": [2, 2, 2], "accept_ratio_per_head": [1.0, 1.0, 1.0],
        "tokens_per_step": 3.0, "accepted_by_source": {"mtp": 4, "ngram": 2}, "method": "mtp", "lossy": False,
    }  # fmt: skip
    assert choice["speculate_metrics"] == expected, "one token from the prompt, then twice three drafts and a bonus"
    chunks = await post_stream(served, COMPLETION, ASK | {"max_tokens": 9})
    assert chunks[-1]["choices"][0]["speculate_metrics"] == expected
    assert all("speculate_metrics" not in chunk["choices"][0] for chunk in chunks[:-1])


async def test_the_openai_package_shows_them(served: Served) -> None:
    answer = await served.api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0, extra_body={"request_id": "r"}
    )
    [choice] = answer.choices
    assert choice.model_extra is not None
    assert choice.model_extra["speculate_metrics"]["tokens_per_step"] == 3.0
    assert choice.model_extra["speculate_metrics"]["accepted_by_source"] == {"mtp": 4, "ngram": 2}


async def test_metrics_of_an_answer_that_a_stop_string_ends(served: Served) -> None:
    stop = TOKENIZER.decode(TOKENS[10:12], skip_hidden=True)
    [choice] = (await post(served, COMPLETION, ASK | {"stop": stop}))["choices"]
    assert choice["finish_reason"] == "stop"
    # One token from the prompt, then steps of four: the stop is in the third, and a fourth may run before it is known.
    assert choice["speculate_metrics"]["accepted_tokens"] in (3 * K, 4 * K)
    assert served.client.aborted == [], "its end was awaited"


@pytest.mark.parametrize(
    ("speculation", "heads"), [({}, K), ({"num_speculative_tokens": 1}, 1), ({"method": "ngram"}, K)]
)
async def test_what_is_asked_for_is_honoured(served: Served, speculation: dict[str, Any], heads: int) -> None:
    [choice] = (await post(served, COMPLETION, ASK | {"speculation": speculation}))["choices"]
    metrics = choice["speculate_metrics"]
    assert len(metrics["accepted_tokens_per_head"]) == heads
    assert metrics["method"] == speculation.get("method", "mtp")


@pytest.mark.parametrize("speculation", [{"enabled": False}, {"method": "naive"}, {"enabled": False, "method": "mtp"}])
async def test_a_request_can_do_without(served: Served, speculation: dict[str, Any]) -> None:
    answer = await post(served, COMPLETION, ASK | {"speculation": speculation})
    assert "speculate_metrics" not in answer["choices"][0]
    assert served.client.engine.stats().verifications == {}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_draft_logprobs(served: Served, path: str) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    ask = ASK | logprobs | {"max_tokens": 9, "include_draft_logprobs": True}
    streamed = [chunk["choices"][0] for chunk in await post_stream(served, path, ask)]
    for choice in (
        (await post(served, path, ask))["choices"][0],
        [part for part in streamed if part["logprobs"]][-1],
    ):
        drafts, tokens = choice["draft_logprobs"], choice["logprobs"]
        if path == CHAT:
            columns = [[e[name] for e in drafts["content"]] for name in ("logprob", "position", "accepted", "token")]
            assert all(len(e["top_logprobs"]) == 2 for e in drafts["content"])
            names = [e["token"] for e in tokens["content"]]
        else:
            columns = [drafts[name] for name in ("token_logprobs", "position", "accepted", "tokens")]
            names = tokens["tokens"]
        num_steps = len(columns[0]) // K
        assert columns[:3] == [[-0.5, -1.0, -1.5] * num_steps, [0, 1, 2] * num_steps, [True] * K * num_steps]
        assert columns[3][-K:] == names[-1 - K : -1]
    without = (await post(served, path, ask | {"include_draft_logprobs": False}))["choices"][0]
    assert "draft_logprobs" not in without


async def refusals(s: Served, cases: Sequence[tuple[str, dict[str, Any], str]]) -> None:
    for path, options, message in cases:
        response = await s.http.post(path, json=ASK | options)
        error = response.json()["error"]
        assert response.status_code == 400, options
        assert message in error["message"]
        assert error["param"] == next(iter(options))
    assert s.client.submitted == []


async def test_wrong_options_are_named(served: Served) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"speculation": True}, "speculation: expected"),
        (CHAT, {"speculation": {"metod": "mtp"}}, "speculation.metod: unknown field (did you mean 'method'?)"),
        (CHAT, {"speculation": {"method": 1}}, "speculation.method: expected text, got 1"),
        (CHAT, {"speculation": {"enabled": "no"}}, "speculation.enabled: expected true or false, got 'no'"),
        (CHAT, {"speculation": {"method": "suffix"}}, "expected one of naive, ngram, mtp (what this server"),
        (COMPLETION, {"speculation": {"num_speculative_tokens": 4}}, "speculation.num_speculative_tokens: expected an"),
        (COMPLETION, {"include_draft_logprobs": True}, "include_draft_logprobs: expected only with logprobs"),
        (CHAT, {"include_draft_logprobs": 1, "logprobs": True}, "include_draft_logprobs: expected true or false"),
    ]  # fmt: skip
    await refusals(served, cases)


async def test_a_plain_server_refuses_what_it_cannot_do() -> None:
    async with serve() as s:
        await refusals(
            s,
            [
                (CHAT, {"speculation": {"enabled": True}}, "started without speculation"),
                (COMPLETION, {"speculation": {"method": "mtp"}}, "started without speculation"),
                (COMPLETION, {"include_draft_logprobs": True, "logprobs": 1}, "enable_draft_logprob"),
            ],
        )
        answer = await post(s, COMPLETION, ASK | {"speculation": {"enabled": False}})
        assert "speculate_metrics" not in answer["choices"][0]
        card = (await s.http.get("/v1/models")).json()["data"][0]
        assert card["speculation"] == {
            "method": "naive", "methods": ["naive"], "max_draft_tokens": 0, "lossy": False, "draft_logprobs": False
        }  # fmt: skip


# By accept_all, under the default strategy.
LOSSY = replace(SPECULATION, lossy=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_lossy_answers_say_so(stream: bool) -> None:
    config = replace(server_config(), speculative=SpeculativeConfig(accept_policy="accept_all"))
    async with serve(config, executor=executor(OracleProposer, LOSSY)) as s:
        response = await s.http.post(COMPLETION, json=ASK | {"stream": stream})
        assert response.headers["X-Speculation-Lossy"] == "true"
        assert '"lossy":true' in response.text
        response = await s.http.post(COMPLETION, json=ASK | {"stream": stream, "speculation": {"enabled": False}})
        assert "X-Speculation-Lossy" not in response.headers
        assert "lossy" not in response.text


@pytest.mark.parametrize("strategy", ["greedy", "topp"])
async def test_a_strategy_of_the_server_changes_plain_answers_too(strategy: Literal["greedy", "topp"]) -> None:
    config = replace(server_config(), speculative=SpeculativeConfig(verify_strategy=strategy))
    async with serve(config, executor(OracleProposer, LOSSY)) as s:
        plain = ASK | {"temperature": 0, "speculation": {"enabled": False}}
        response = await s.http.post(COMPLETION, json=plain)
        assert "X-Speculation-Lossy" not in response.headers, "all strategies draw the same there"
        assert "lossy" not in response.text
        response = await s.http.post(COMPLETION, json=plain | {"temperature": 1})
        assert response.headers["X-Speculation-Lossy"] == "true"
        metrics = response.json()["choices"][0]["speculate_metrics"]
        assert (metrics["method"], metrics["lossy"], metrics["accepted_tokens"]) == ("naive", True, 0)


async def test_lossless_answers_carry_no_header(served: Served) -> None:
    response = await served.http.post(COMPLETION, json=ASK)
    assert "X-Speculation-Lossy" not in response.headers


async def test_the_model_card_tells_what_may_be_asked(served: Served) -> None:
    card = (await served.http.get(f"/v1/models/{MODEL}")).json()
    assert card["speculation"] == {
        "method": "mtp",
        "methods": ["naive", "ngram", "mtp"],
        "max_draft_tokens": K,
        "lossy": False,
        "draft_logprobs": True,
    }
