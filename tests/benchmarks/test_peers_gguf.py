"""The comparison on a GGUF file, with small servers that count."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from benchmarks.load_client import Load
from benchmarks.peers import gguf, launch
from benchmarks.peers.launch import AS_FILE, Launch
from benchmarks.peers.machine import Machine
from benchmarks.peers.over_http import Server
from benchmarks.record import Record

pytestmark = pytest.mark.slow

PLAN = gguf.GgufPlan({1: 1, 2: 3}, output_len=8, prompt_len=70, rounds=2)


@pytest.mark.parametrize("fault", ["", "length"])
def test_both_servers_get_the_same_new_prompts_and_every_cell_is_filled_or_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_server(peer: str, model: Path, fmt: str, port: int, *_: object) -> Launch:
        assert (model.name, fmt) == ("model.gguf", "" if peer == gguf.LLAMACPP else AS_FILE)
        its_fault = fault if peer == gguf.LLAMACPP else ""
        return Launch([sys.executable, "-m", "tests.doubles.peer_server", str(port), its_fault], {})

    problems = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(problems, "wt") as file:
        file.writelines(json.dumps({"prompt": f"def f{i}(x): return x + {i}"}) + "\n" for i in range(20))
    monkeypatch.setattr(launch, "model_server", model_server)
    monkeypatch.setattr(gguf, "fetch", lambda source: problems)
    monkeypatch.setattr(gguf, "LOGS", tmp_path)
    state = {"read_gb_per_s": 1.0, "matmul_gflops": 1.0, "foreign_cpus": 0.0}
    monkeypatch.setattr(Machine, "measure", lambda machine: state)  # it takes seconds on a busy machine
    sent: dict[str, list[object]] = {}
    run = Server.run

    def noting(server: Server, load: Load, extra: object) -> float:
        if load.output_len <= PLAN.output_len:  # else before the first turn
            sent.setdefault(f"{server._url} {extra}", []).append(load.prompts())
        return run(server, load, extra)  # type: ignore[arg-type]

    monkeypatch.setattr(Server, "run", noting)
    table = gguf.compare(tmp_path / "model.gguf", [AS_FILE], 1, PLAN, tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [rows[0], *(row[0] for row in rows[2:])] == [
        ["Weights", "prompt", "1 in flight", "2 in flight", "GB"], "as the file, auto", "as the file, plain", "llamacpp"
    ]  # fmt: skip
    assert [cell == "-" for cell in rows[-1][1:4]] == [bool(fault)] * 3
    assert all(cell.endswith("x)") != bool(fault) for row in rows[2:4] for cell in row[1:4])
    assert ("llamacpp: request: expected 64 tokens, got 63" in table) == bool(fault)
    [record] = Record.load_all(tmp_path)
    assert len(record.metrics["cases"]) == 9
    auto, plain, *llamacpp = sent.values()
    assert auto == plain
    assert llamacpp == ([] if fault else [auto])
    prompts = [json.dumps(prompt) for load in auto for prompt in load]  # type: ignore[attr-defined]
    assert len(set(prompts)) == len(prompts) == 2 * (1 + 1 + 3)
