"""The comparison's driver, over workers that count without computing: turns, checks, failures, records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hardware import MemorySpeed
from benchmarks.peers import in_process, launch, machine, over_http
from benchmarks.peers.catalogue import Plan
from benchmarks.peers.in_process import InProcess
from benchmarks.peers.launch import Launch
from benchmarks.peers.over_http import Drafter, Texts, measure_speculation
from benchmarks.peers.process import PeerError, Turns, Worker
from benchmarks.peers.results import Case, Group
from benchmarks.peers.run import Comparison, Scope
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig
from fastdeploy_sd.device import library
from fastdeploy_sd.errors import ConfigError

pytestmark = pytest.mark.slow

PLAN = Plan(batches=(1, 3), steps=4, rows=(1, 5), contexts=(64,), rounds=3, copy_prompts=2, copy_output_len=40)
Start = Callable[..., Worker]


def double(fault: str = "") -> Launch:
    return Launch([sys.executable, "-m", "tests.doubles.peer_worker", fault], {})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers and leaves them paused; `fault` as in tests/doubles/peer_worker.py."""
    workers: list[Worker] = []

    def start_one(fault: str = "") -> Worker:
        worker = Worker(double(fault), tmp_path / f"{len(workers)}.log")
        workers.append(worker)
        worker.pause()
        return worker

    yield start_one
    for worker in workers:
        worker.close()


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """The machine is measured with as many threads as a comparison has; later tests want theirs back."""
    count = library.num_threads()
    yield
    library.set_num_threads(count)


class _Logged:
    """Stands for a process and says when it runs."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def resume(self) -> None:
        self._log.append(f"+{self._name}")

    def pause(self) -> None:
        self._log.append(f"-{self._name}")


def test_turns_rotate_and_only_one_program_runs() -> None:
    log: list[str] = []
    processes: Any = {name: _Logged(name, log) for name in "abc"}
    cases = {name: [Case("1", name, 1)] for name in "abc"}
    cases["b"][0].failed = "it has none"
    Turns(processes, cases, lambda: log.append("|")).rounds(3, log.append)
    assert "".join(log) == "|+aa-a+cc-c|+cc-c+aa-a|+cc-c+aa-a"


def test_answers_are_told_from_what_libraries_print(start: Start) -> None:
    worker = start()
    worker.resume()
    settings = {"threads": 2, "max_seqs": 1, "max_len": 9, "kv_cache_dtype": "auto"}
    loaded = worker.call("load", 30, model="m", fmt="q", settings=settings)
    assert loaded == {"versions": {"counting": "1"}, "kv_type": "q", "notes": "m 2"}
    assert worker.last_line() == "a library says hello"


def test_errors_of_a_worker_name_their_reason_and_leave_it_usable(start: Start) -> None:
    worker = start()
    worker.resume()
    with pytest.raises(PeerError, match="CannotError: this peer only drafts"):
        worker.call("generate", 30, prompt=[512], max_tokens=1, option={})
    with pytest.raises(PeerError, match=r"expected one of load, .*, got 'sing'"):
        worker.call("sing", 30)
    assert worker.call("stop", 30) == {}


def test_decode_takes_turns_and_drops_the_first_step_of_each(start: Start) -> None:
    rounds: list[None] = []
    runner = InProcess({"ours": start(), "openvino": start()}, PLAN, lambda: rounds.append(None))
    cases = runner.measure("decode")
    assert [(case.case, case.peer) for case in cases] == [
        ("1", "ours"), ("1", "openvino"), ("3", "ours"), ("3", "openvino"),
    ]  # fmt: skip
    for case in cases:
        assert case.failed is None
        assert case.seconds == [[1e-3 * case.work] * 4] * 3
        assert case.tokens_per_s() == pytest.approx(1000)
    assert len(rounds) == 2 * PLAN.rounds == PLAN.num_rounds("decode")


def test_prefill_and_forward(start: Start) -> None:
    runner = InProcess({"ours": start()}, PLAN, lambda: None)
    [prefill] = runner.measure("prefill")
    assert prefill.seconds == [[0.5]] * 3
    assert prefill.tokens_per_s() == 1024
    cases = runner.measure("forward")
    assert [(case.case, case.work) for case in cases] == [("1@64", 1), ("5@64", 5)]
    assert [case.seconds for case in cases] == [[[1e-3] * 2] * 3, [[5e-3] * 2] * 3]


@pytest.mark.parametrize(
    ("metric", "fault", "reason"),
    [
        ("decode", "start=WRONG", "tokens: expected"),
        ("decode", "decode=WRONG", "tokens: expected"),
        ("prefill", "prefill=WRONG", "tokens: expected"),
        ("decode", "decode=DEAD", "the worker has ended: out of luck"),
        ("forward", "forward=DEAD", "the worker has ended: out of luck"),
        ("forward", "forward=SILENT", "forward: expected an answer within 1 s, got none"),
    ],
)
def test_a_failing_peer_is_out_and_the_others_go_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, metric: str, fault: str, reason: str
) -> None:
    bad, good = start(fault), start()
    good.resume()
    good.call("stop", 30)  # it has started
    good.pause()
    monkeypatch.setattr(in_process, "CALL_TIMEOUT_S", 1.0 if "SILENT" in fault else 60.0)
    cases = InProcess({"llamacpp": bad, "ours": good}, PLAN, lambda: None).measure(metric)
    for case in cases:
        if case.peer == "ours":
            assert case.failed is None
            assert len(case.seconds) == PLAN.rounds
        else:
            assert case.failed is not None
            assert case.failed.startswith(reason)
    if "SILENT" in fault:
        bad.resume()
        with pytest.raises(PeerError, match="the worker has ended"):  # not taken for an answer when it comes late
            bad.call("stop", 30)


def test_speculation_measures_every_way_of_drafting(start: Start) -> None:
    slow, fast = start(), start("generate=WRONG")
    drafters = [
        Drafter("openvino", "slow", slow, {"speed": 20.0}),
        Drafter("openvino", "fast", slow, {"speed": 80.0}),
        Drafter("transformers", "wrong", fast, {"speed": 80.0}),
    ]
    cases = {case.case: case for case in measure_speculation(drafters, PLAN, lambda: None)}
    assert cases["slow"].tokens_per_s() == pytest.approx(20)
    assert cases["fast"].tokens_per_s() == pytest.approx(80)
    assert cases["wrong"].failed is not None
    assert [len(case.seconds) for case in cases.values()] == [PLAN.server_rounds] * 2 + [0]


def test_texts_to_copy_are_new_in_every_round(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    run = Drafter.run

    def remember(self: Drafter, texts: Texts) -> float:
        seen.extend(texts.prompts())
        return run(self, texts)

    monkeypatch.setattr(Drafter, "run", remember)
    measure_speculation([Drafter("openvino", "one", start(), {"speed": 1.0})], PLAN, lambda: None)
    assert len(seen) == (PLAN.server_rounds + 1) * PLAN.copy_prompts
    assert len({tuple(prompt) for prompt in seen}) == len(seen)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scope:
    monkeypatch.setattr(launch, "verify_ready", lambda peer, bits: None)
    monkeypatch.setattr(launch, "worker", lambda peer, threads: double())
    monkeypatch.setattr("benchmarks.peers.run.LOGS", tmp_path / "logs")
    monkeypatch.setattr("benchmarks.peers.run.revision", lambda: "abc")
    monkeypatch.setattr(machine, "measure_memory", lambda: MemorySpeed(40.0, 100.0))
    return Scope(("ours", "vllm"), ("bf16", "8-bit"), ("decode", "prefill"), 2, "auto", PLAN, tmp_path / "records")


def test_a_run_writes_a_record_per_metric_and_bits_and_measures_none_twice(
    scope: Scope, capsys: pytest.CaptureFixture[str]
) -> None:
    Comparison(scope).run()
    groups = {group.file_name: group for group in Group.load_all(scope.output)}
    assert sorted(groups) == ["decode-8-bit", "decode-bf16", "prefill-8-bit", "prefill-bf16"]
    decode = groups["decode-bf16"]
    assert len(decode.rounds) == PLAN.num_rounds("decode")
    assert decode.rounds[0].keys() == {"read_gb_per_s", "core_latency_ns", "matmul_gflops", "foreign_cpus"}
    assert decode.peers["ours"]["versions"] == {"counting": "1"}
    assert groups["decode-8-bit"].peers["vllm"]["failed"] == "it runs in bf16 only here"
    assert {case.peer for case in groups["decode-8-bit"].cases} == {"ours"}
    assert "18/18" in capsys.readouterr().err
    (scope.output / "prefill-bf16.json").unlink()
    before = (scope.output / "decode-bf16.json").read_bytes()
    Comparison(scope).run()
    assert "3/3" in capsys.readouterr().err, "rounds of the missing record only"
    assert (scope.output / "prefill-bf16.json").exists()
    assert (scope.output / "decode-bf16.json").read_bytes() == before


def test_a_record_of_another_revision_or_with_a_failure_is_measured_again(
    scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(scope, peers=("ours", "llamacpp"), bits=("8-bit",), metrics=("prefill",))
    path = narrow.output / "prefill-8-bit.json"
    broken = Launch([sys.executable, "-c", "raise SystemExit('no room')"], {})
    monkeypatch.setattr(launch, "worker", lambda peer, threads: double() if peer == "ours" else broken)
    Comparison(narrow).run()
    failed = Group.load(path)
    assert failed.git_sha == "abc"
    assert failed.peers["llamacpp"]["failed"] == "the worker has ended: no room"
    assert [metric for _, metric in Comparison(narrow).todo] == ["prefill"], "a peer did not load"
    monkeypatch.setattr(launch, "worker", lambda peer, threads: double())
    Comparison(narrow).run()
    assert {case.peer for case in Group.load(path).cases} == {"ours", "llamacpp"}
    assert Comparison(narrow).todo == []
    measured = Group.load(path)
    measured.cases[0].failed = "out of luck"
    measured.save(narrow.output)
    assert [metric for _, metric in Comparison(narrow).todo] == ["prefill"], "a case failed"
    measured.cases[0].failed = None
    measured.save(narrow.output)
    assert Comparison(narrow).todo == []
    monkeypatch.setattr("benchmarks.peers.run.revision", lambda: "abc-dirty-1")
    Comparison(narrow).run()
    assert Group.load(path).git_sha == "abc-dirty-1"


def test_a_peer_without_a_server_has_not_failed_over_http(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = replace(scope, peers=("openvino",), bits=("8-bit",), metrics=("http",))
    Comparison(libraries).run()
    [group] = Group.load_all(scope.output)
    assert group.peers["openvino"]["failed"] == "it has no server with OpenAI's API here"
    assert Comparison(libraries).todo == []


def test_every_drafter_of_a_peer_has_a_log_of_its_own(
    scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_http, "CHECKPOINT", ModelConfig(DEMO_MODEL).path)

    def counting(peer: str, bits: str, port: int, settings: object, drafting: object) -> Launch:
        return Launch([sys.executable, "-m", "tests.doubles.peer_server", str(port), ""], {})

    monkeypatch.setattr(launch, "server", counting)
    Comparison(replace(scope, peers=("ours",), bits=("8-bit",), metrics=("speculation",))).run()
    [group] = Group.load_all(scope.output)
    assert [(case.case, case.failed) for case in group.cases] == [
        ("ngram, 8 drafts", None), ("ngram, 11 drafts", None),
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "ours-8-bit-server-ngram-11-drafts.log", "ours-8-bit-server-ngram-8-drafts.log",
    ]  # fmt: skip


def test_a_peer_that_is_not_set_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "venv", lambda peer: tmp_path / peer)
    with pytest.raises(ConfigError, match=r"expected transformers in .*, found none; run setup first"):
        launch.verify_ready("transformers", "bf16")
    monkeypatch.setattr(launch, "model_path", lambda peer, fmt: tmp_path / fmt)
    with pytest.raises(ConfigError, match=r"expected ours's 8-bit model at .*wint8, found none; run setup first"):
        launch.verify_ready("ours", "8-bit")
