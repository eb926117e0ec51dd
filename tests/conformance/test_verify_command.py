"""`fastdeploy-sd verify` on tiny models: it passes where the promise holds, and finds what breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.conformance import Method, Reference, Way, make_reference, run_alone, run_matrix
from fastdeploy_sd.types import DraftTokens
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer

WAY = Way("batch of 7", max_num_seqs=7, arrivals_per_step=2)
DRAFTING = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = str(Path(__file__).resolve().parents[1] / "golden" / "qwen3-tiny")
    return make_reference(Config(ModelConfig(model)), seed=0, count=12)


def continuations(reference: Reference) -> dict[str, list[int]]:
    return {
        r.request_id: [*r.prompt_token_ids.tolist(), *reference.answers[r.request_id].token_ids]
        for r in reference.requests
    }


def double(name: str, kind: type, reference: Reference, speculative: SpeculativeConfig = DRAFTING) -> Method:
    vocab_size = 4096
    return Method(name, speculative, lambda: kind(continuations(reference), vocab_size))


def test_the_reference_is_each_request_by_itself(reference: Reference) -> None:
    assert run_alone(reference.base, reference.requests[:3]) == {
        r.request_id: reference.answers[r.request_id] for r in reference.requests[:3]
    }
    assert reference.base.model.max_model_len == 512


def test_any_drafts_give_the_same_answers(reference: Reference) -> None:
    methods = [double(kind.__name__, kind, reference) for kind in (OracleProposer, WrongProposer, RandomLengthProposer)]
    seen = []
    matrix = run_matrix(reference, [WAY], methods, seen.append)
    assert matrix.is_proof
    assert [cell.method for cell in seen] == [m.name for m in methods]
    oracle, wrong, _ = (matrix.column(m.name) for m in methods)
    assert oracle.num_accepted == oracle.num_drafts > 0
    assert wrong.num_accepted == 0 < wrong.num_drafts


def test_a_verification_that_accepts_everything_is_found(reference: Reference) -> None:
    broken = SpeculativeConfig(method="ngram", num_speculative_tokens=3, accept_policy="accept_all")
    matrix = run_matrix(reference, [WAY], [double("broken", WrongProposer, reference, broken)])
    assert not matrix.is_proof
    [cell] = matrix.differences
    difference = cell.difference
    assert difference is not None
    assert difference.what == "token"
    expected = reference.answers[difference.request_id].token_ids
    # The wrong drafts are the right ones plus one.
    assert difference.expected == str(expected[difference.position])
    assert difference.got == str((expected[difference.position] + 1) % 4096)


class Idle(OracleProposer):
    """Never drafts."""

    def propose(self, x):  # type: ignore[no-untyped-def]
        return DraftTokens.none(len(x.request_ids))


def test_a_method_that_never_drafts_proves_nothing(reference: Reference) -> None:
    matrix = run_matrix(reference, [WAY], [double("idle", Idle, reference)])
    assert not matrix.differences
    assert matrix.idle_methods == ("idle",)
    assert not matrix.is_proof


def test_a_way_that_never_preempts_proves_nothing(reference: Reference) -> None:
    roomy = Way("roomy", num_blocks=1000, must_preempt=True)
    matrix = run_matrix(reference, [roomy], [double("oracle", OracleProposer, reference)])
    assert matrix.gaps == ["oracle, roomy: no preemption"]


def test_the_command_proves_a_model(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(golden_dir / "llama-tiny")
    arguments = ["verify", "--model", model, "--methods", "naive", "ngram", "--num-speculative-tokens", "2", "--quick"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["naive", "ngram", "k=2"]
    assert "10 of 10 cells equal to plain decoding, bit for bit" in text
    assert "DIFFERS" not in text


def test_what_was_asked_for_must_load(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(golden_dir / "llama-tiny")
    assert main(["verify", "--model", model, "--methods", "mtp", "--quick"]) == 2
    assert capsys.readouterr().err.startswith("fastdeploy-sd: ")


def test_a_lossy_configuration_cannot_be_proved(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2, "verify_strategy": "topp"}'
    assert main(["verify", "--model", str(golden_dir / "llama-tiny"), "--speculative-config", config]) == 2
    assert "expected verify_strategy target_match" in capsys.readouterr().err
