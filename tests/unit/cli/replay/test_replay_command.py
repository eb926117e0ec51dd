"""`fastdeploy-sd replay`: options, the table, and errors as one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.cli.replay.counts import ReplayCounts
from fastdeploy_sd.cli.replay.report import ReplayResult, replay_table
from fastdeploy_sd.spec_decode.control import profile as auto_profile


@pytest.fixture
def recording(tmp_path: Path) -> str:
    code = "def area(width, height):\n    return width * height\n" * 3
    messages = [{"role": "user", "content": f"Repeat:\n{code}"}, {"role": "assistant", "content": code}]
    path = tmp_path / "recording.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": messages}) + "\n", encoding="utf-8")
    return str(path)


def test_a_row_per_method_and_length(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "replay",
        recording,
        "--methods",
        "ngram",
        "--num-speculative-tokens",
        "2",
        "5",
        "--tokenizer",
        "words",
    ]
    assert main([*arguments, "--json"]) == 0
    short, long = json.loads(capsys.readouterr().out)
    assert [short["num_speculative_tokens"], long["num_speculative_tokens"]] == [2, 5]
    # The answer is in the prompt: nearly every step is full.
    assert 2.5 < short["tokens_per_verify_step"] <= 3.0
    assert 4.5 < long["tokens_per_verify_step"] <= 6.0
    assert short["num_drafted"] == short["num_accepted"] + short["num_wasted"]
    assert long["peak_memory_bytes"] > 0
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["method", "k", "shared", "cache", "tokens/step"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["ngram", "2", "-", f"{short['tokens_per_verify_step']:.2f}"],
        ["ngram", "5", "-", f"{long['tokens_per_verify_step']:.2f}"],
    ]


def test_the_policy_is_replayed_under_a_cost(
    recording: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = tmp_path / "costs.json"
    steps = [{"rows": rows, "requests": 1, "context": 8, "ms": 1.0 + 0.1 * (rows - 1)} for rows in (1, 5, 41)]
    profile.write_text(
        json.dumps({"version": auto_profile.VERSION, "machine": {}, "model": {}, "steps": steps, "drafts": []})
    )
    base = ["replay", recording, "--tokenizer", "words", "--json", "--policy", "auto", "--methods", "ngram"]
    results = []
    for cost in (["--cost", "0.1"], ["--profile", str(profile)]):
        assert main([*base, *cost, "--num-speculative-tokens", "3"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    fixed, auto = results[0]
    assert (fixed["method"], auto["method"]) == ("ngram", "auto")
    # The recording has one response: a plain step per token takes 1.
    num_tokens = fixed["num_output_tokens"] - 1
    assert fixed["speed_up"] == pytest.approx(num_tokens / (fixed["num_verify_steps"] + 0.1 * fixed["num_drafted"]))
    assert auto["speed_up"] > fixed["speed_up"] > 1.0
    for linear, measured in zip(*results, strict=True):
        assert measured["speed_up"] == pytest.approx(linear["speed_up"])


def test_drafts_take_the_time_to_read_their_contexts(
    recording: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Measured: a draft of one request takes no time by itself, and a thousand tokens of context a second each time."""
    times = {(1, 8): 1.0, (5, 8): 1.0, (1, 1008): 1001.0, (5, 1008): 5001.0}
    steps = [{"rows": rows, "requests": 1, "context": at, "ms": ms} for (rows, at), ms in times.items()]
    profile = tmp_path / "costs.json"
    profile.write_text(
        json.dumps({"version": auto_profile.VERSION, "machine": {}, "model": {}, "steps": steps, "drafts": []})
    )
    base = ["replay", recording, "--tokenizer", "words", "--json", "--methods", "ngram"]
    assert main([*base, "--profile", str(profile), "--num-speculative-tokens", "3"]) == 0
    [fixed] = json.loads(capsys.readouterr().out)
    num_tokens, num_rows = fixed["num_output_tokens"] - 1, fixed["num_verify_steps"] + fixed["num_drafted"]
    assert fixed["num_drafted"] > fixed["num_verify_steps"]
    assert fixed["speed_up"] == pytest.approx(num_tokens / num_rows, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "auto"], "policy: expected with cost or profile, got neither"),
        (["--cost", "-1"], "cost: expected a number of at least 0, got -1.0"),
        (["--profile", "nowhere.json"], "profile: expected a readable file, got nowhere.json"),
    ],
)
def test_a_wrong_cost_is_one_line(
    recording: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", recording, "--tokenizer", "words", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_tuning_reaches_the_method(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    num_verify_steps = []
    for size in ("2", "40"):
        sizes = ["--min-ngram-size", size, "--max-ngram-size", size]
        assert main(["replay", recording, "--methods", "ngram", "--tokenizer", "words", "--json", *sizes]) == 0
        [result] = json.loads(capsys.readouterr().out)
        num_verify_steps.append(result["num_verify_steps"])
    # Forty tokens must be plain decoding's before the longer end is found.
    assert num_verify_steps[1] > num_verify_steps[0] + 20


def test_a_key_of_both_methods_reaches_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy in which some tokens are replaced: without following it, steps go by without drafts."""
    words = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(200)]
    copy = ["other" if i % 20 == 19 else word for i, word in enumerate(words)]
    messages = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": " ".join(copy)}]
    path = tmp_path / "copy.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": messages}) + "\n", encoding="utf-8")
    rates = []
    for value in ("true", "false"):
        arguments = ["replay", str(path), "--methods", "suffix,ngram", "--tokenizer", "words", "--json"]
        assert main([*arguments, "--num-speculative-tokens", "8", "--follow-copies", value]) == 0
        rates.append([row["tokens_per_verify_step"] for row in json.loads(capsys.readouterr().out)])
    assert all(on > 1.1 * off for on, off in zip(*rates, strict=True)), rates


@pytest.mark.parametrize(
    ("options", "is_shared", "text"),
    [
        ([], True, "yes"),
        (["--no-shared-cache"], False, "no"),
        (["--suffix-decoding-max-cached-requests", "0"], False, "no"),
    ],
)
def test_rows_say_whether_answers_were_shared(
    recording: str, capsys: pytest.CaptureFixture[str], options: list[str], is_shared: bool, text: str
) -> None:
    arguments = ["replay", recording, "--tokenizer", "words", *options]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["shared_cache"]) for row in rows] == [("ngram", None), ("suffix", is_shared)]
    assert main(arguments) == 0
    _, ngram, suffix = capsys.readouterr().out.splitlines()
    assert (ngram.split()[2], suffix.split()[2]) == ("-", text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--methods", "ngrm"], "methods: expected some of ngram, suffix, got 'ngrm' (did you mean 'ngram'?)"),
        (["--concurrency", "0"], "concurrency: expected at least 1, got 0"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens: expected at least 1 with method ngram, got 0"),
        (
            ["--methods", "ngram", "--min-ngram-size", "9"],
            "max_ngram_size: expected at least min_ngram_size (9), got 5",
        ),
        (
            ["--methods", "ngram", "--suffix-decoding-min-token-prob", "0.5"],
            "suffix_decoding_min_token_prob: expected suffix among the methods, got ngram",
        ),
        (
            ["--no-shared-cache", "--suffix-decoding-max-cached-requests", "3"],
            "no_shared_cache: expected without suffix_decoding_max_cached_requests, got both",
        ),
        (
            ["--methods", "suffix", "--ngram-max-spec-factor", "1"],
            "ngram_max_spec_factor: expected ngram among the methods, got suffix",
        ),
        (["--follow-copies", "maybe"], "follow_copies: expected true or false, got 'maybe'"),
        (["--no-shared-cache", "--methods", "ngram"], "no_shared_cache: expected suffix among the methods, got ngram"),
        (["--tokenizer", "nowhere"], "expected a tokenizer.json or a tokenizer.model, got neither"),
    ],
)
def test_errors_are_one_line(recording: str, capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    assert main(["replay", recording, *options]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_table_of_known_counts() -> None:
    counts = ReplayCounts(
        np.array([10, 8]), np.array([10, 5]), np.array([5, 1]),
        num_responses=2, num_output_tokens=32, num_verify_steps=20, num_drafting_steps=10,
        num_calls=4, num_rows=8, propose_ns=16_000, peak_memory_bytes=3 << 19,
    )  # fmt: skip
    head, row = replay_table([ReplayResult("suffix", 2, counts, has_shared_cache=True, speed_up=1.25)]).splitlines()
    assert row.split() == ["suffix", "2", "yes", "1.50", "1.250", "18", "6", "12", "4.0", "2.0", "1.5", "50%", "20%"]
    assert head.index("tokens/step") + len("tokens/step") == row.index("1.50") + len("1.50")
