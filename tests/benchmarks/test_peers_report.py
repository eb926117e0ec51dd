"""What the comparison says: prompts, the counting weights, records, tables, plot and command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import counting_checkpoint
from benchmarks.peers.counting import (
    COPY_LEN,
    EDIT_DISTANCE,
    FIRST_TOKEN,
    NUM_TOKENS,
    answer,
    copy_prompt,
    next_token,
    random_prompt,
)
from benchmarks.peers.report import tables, write_report
from benchmarks.peers.results import Case, Group, speed_ratios

pytestmark = pytest.mark.slow

STATE = {"read_gb_per_s": 40.0, "core_latency_ns": 30.0, "matmul_gflops": 200.0, "foreign_cpus": 0.1}


def group(metric: str, bits: str, cases: list[Case], failed: dict[str, str] | None = None) -> Group:
    """A record with two rounds; the peers are those of the cases and of `failed`."""
    reasons = failed or {}
    peers = dict.fromkeys([*(case.peer for case in cases), *reasons])
    return Group(
        metric=metric,
        bits=bits,
        created="2026-01-02T03:04:05+00:00",
        git_sha="abc",
        settings={"threads": 2},
        machine={"cpu": "a processor", "num_cpus": 2},
        rounds=[STATE, STATE | {"read_gb_per_s": 60.0}],
        peers={
            peer: {
                "format": f"{peer}-{bits}", "versions": {peer: "1.2"}, "kv_type": "bf16", "notes": "",
                "failed": reasons.get(peer),
            }
            for peer in peers
        },
        cases=cases,
    )  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """Cells of every table row."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_count_goes_round() -> None:
    assert next_token(FIRST_TOKEN) == FIRST_TOKEN + 1
    assert next_token(FIRST_TOKEN + NUM_TOKENS - 1) == FIRST_TOKEN
    assert answer([7, FIRST_TOKEN + NUM_TOKENS - 2], 3) == [FIRST_TOKEN + NUM_TOKENS - 1, FIRST_TOKEN, FIRST_TOKEN + 1]


def test_the_weights_count() -> None:
    """The last layer's MLP and the head, in float32, over every token: the nearest wrong one is far behind."""
    hidden = 256
    embeddings = counting_checkpoint.embeddings(hidden)
    gate, up, down = (np.zeros(shape, np.float32) for shape in ((3 * hidden, hidden),) * 2 + ((hidden, 3 * hidden),))
    for name, weights in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        counting_checkpoint.set_mlp(name, weights)
    normed = embeddings / np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
    gates = normed @ gate.T
    out = embeddings + (gates / (1 + np.exp(-gates)) * (normed @ up.T)) @ down.T
    logits = out[:, 2:] @ embeddings[:, 2:].T
    wanted = (np.arange(NUM_TOKENS) + 1) % NUM_TOKENS
    best = logits[np.arange(NUM_TOKENS), wanted].copy()
    logits[np.arange(NUM_TOKENS), wanted] = -np.inf
    assert (logits.argmax(axis=1) != wanted).all()
    assert (logits.max(axis=1) < 0.7 * best).all()


def test_prompts_are_repeatable_and_of_the_count() -> None:
    assert random_prompt(64, 1) == random_prompt(64, 1) != random_prompt(64, 2)
    for prompt in (random_prompt(64, 1), copy_prompt(3), copy_prompt(-1)):
        assert all(FIRST_TOKEN <= token < FIRST_TOKEN + NUM_TOKENS for token in prompt)


def test_a_text_to_copy_is_mostly_its_own_answer() -> None:
    prompt = copy_prompt(5)
    beginning = len(prompt) - COPY_LEN
    assert prompt[:beginning] == prompt[COPY_LEN:]
    right = answer(prompt, COPY_LEN - beginning)
    changed = sum(a != b for a, b in zip(prompt[beginning:COPY_LEN], right, strict=True))
    assert changed == len(range(beginning, COPY_LEN - EDIT_DISTANCE, EDIT_DISTANCE))
    others = {token for seed in range(6) if seed != 5 for token in answer(copy_prompt(seed), COPY_LEN)}
    assert others.isdisjoint(right)


def test_records_come_back(tmp_path: Path) -> None:
    written = group("decode", "8-bit", [Case("1", "ours", 1, [[0.5], [0.25]])])
    path = written.save(tmp_path)
    assert path.name == "decode-8-bit.json"
    assert Group.load(path) == written


def test_ratios_are_within_a_round() -> None:
    ours = Case("8", "ours", 8, [[0.1, 0.3, 0.2], [0.4]])
    peer = Case("8", "openvino", 8, [[0.4], [0.4]])
    assert speed_ratios(ours, peer) == pytest.approx([2.0, 1.0])
    assert ours.median_seconds() == pytest.approx(0.3)


def test_decode_table_compares_with_the_best_peer_of_the_same_bits() -> None:
    text = tables(
        [
            group(
                "decode", "8-bit", [Case("1", "ours", 1, [[0.02], [0.01]]), Case("1", "llamacpp", 1, [[0.05], [0.05]])]
            ),
            group(
                "decode",
                "bf16",
                [
                    Case("1", "ours", 1, [[0.04], [0.04]]),
                    Case("1", "llamacpp", 1, [[0.05], [0.05]]),
                    Case("1", "openvino", 1, [[0.06], [0.06]]),
                    Case("1", "vllm", 1, failed="tokens: expected [1], got [2]"),
                ],
            ),
        ]
    )
    assert rows(text)[2:] == [
        ["bf16", "fastdeploy_sd (ours-bf16, KV bf16)", "25.0"],
        ["bf16", "llama.cpp (llamacpp-bf16, KV bf16)", "20.0"],
        ["bf16", "OpenVINO GenAI (openvino-bf16, KV bf16)", "16.7"],
        ["bf16", "vLLM (CPU) (vllm-bf16, KV bf16)", "-"],
        ["bf16", "**ours / best peer**", "**1.25x** 1.25-1.25 (llama.cpp)"],
        ["8-bit", "fastdeploy_sd (ours-8-bit, KV bf16)", "66.7"],
        ["8-bit", "llama.cpp (llamacpp-8-bit, KV bf16)", "20.0"],
        ["8-bit", "**ours / best peer**", "**3.75x** 2.50-5.00 (llama.cpp)"],
    ]
    assert "read bandwidth 40.00 to 60.00 (median 50.00) GB/s" in text
    assert "- vLLM (CPU): tokens: expected [1], got [2] (decode-bf16 1)" in text


def test_forward_table_shows_the_price_of_more_rows_per_context() -> None:
    cases = [
        Case("1@512", "ours", 1, [[0.010], [0.020]]),
        Case("5@512", "ours", 5, [[0.011], [0.023]]),
        Case("5@4096", "ours", 5, [[0.030], [0.030]]),
    ]
    text = tables([group("forward", "4-bit", cases)])
    assert "after 512 tokens" in text
    table = rows(text)
    assert table[0] == ["Weights", "", "1", "5"]
    assert table[2][2:] == ["15.0 (1.00)", "17.0 (1.12)"]
    assert table[4] == ["Weights", "", "5"]
    assert table[6][2:] == ["30.0"]


def test_a_busy_machine_is_said() -> None:
    quiet = group("decode", "bf16", [Case("1", "ours", 1, [[0.5], [0.5]])])
    assert "not quiet" not in tables([quiet])
    quiet.rounds[1] = STATE | {"foreign_cpus": 1.5}
    assert "not quiet: before 1 of 2 rounds" in tables([quiet])


def test_every_revision_and_date_is_named() -> None:
    first = group("decode", "bf16", [Case("1", "ours", 1, [[0.5], [0.5]])])
    second = group("prefill", "bf16", [Case("512", "ours", 512, [[0.5], [0.5]])])
    second.created = "2026-01-03T00:00:00+00:00"
    assert "measured 2026-01-02T03:04:05+00:00 to 2026-01-03T00:00:00+00:00, revision abc.\n" in tables([second, first])
    second.git_sha = "def-dirty-1"
    assert (
        "measured 2026-01-02T03:04:05+00:00, revision abc (decode-bf16); "
        "2026-01-03T00:00:00+00:00, revision def-dirty-1 (prefill-bf16).\n"
    ) in tables([first, second])
    second.machine = first.machine | {"cpu": "another"}
    assert "a processor, 2 CPUs, 2 threads each and another, 2 CPUs, 2 threads each; " in tables([first, second])


def test_speculation_table_shows_each_peers_best() -> None:
    cases = [
        Case("ngram", "ours", 100, [[1.0], [1.0]]),
        Case("suffix", "ours", 100, [[0.5], [0.5]]),
        Case("lookup", "openvino", 100, [[2.0], [2.0]]),
    ]
    text = tables([group("speculation", "8-bit", cases, failed={"vllm": "no room"})])
    assert rows(text)[2:] == [
        ["8-bit", "fastdeploy_sd (ours-8-bit, KV bf16)", "suffix", "200.0"],
        ["8-bit", "OpenVINO GenAI (openvino-8-bit, KV bf16)", "lookup", "50.0"],
        ["8-bit", "vLLM (CPU) (vllm-8-bit, KV bf16)", "-", "-"],
        ["8-bit", "**ours / best peer**", "", "**4.00x** 4.00-4.00 (OpenVINO GenAI)"],
    ]
    assert "- vLLM (CPU): no room (speculation-8-bit)" in text


@pytest.mark.parametrize(
    ("metrics", "height"), [(["decode"], 384), (["decode", "forward"], 2 * 384), (["decode", "prefill"], 384)]
)
def test_report_writes_the_tables_and_a_plot_without_empty_rows(
    metrics: list[str], height: int, tmp_path: Path
) -> None:
    cases = {"decode": Case("8", "ours", 8, [[0.5]]), "forward": Case("1@512", "openvino", 1, [[0.5]])}
    cases["prefill"] = Case("512", "ours", 512, [[0.5]])
    for metric in metrics:
        group(metric, "bf16", [cases[metric]]).save(tmp_path)
    text = write_report(tmp_path)
    assert (tmp_path / "results.md").read_text() == text + "\n"
    data = (tmp_path / "results.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert [int.from_bytes(data[i : i + 4], "big") for i in (16, 20)] == [480, height]
