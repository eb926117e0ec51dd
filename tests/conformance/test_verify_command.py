"""`fastdeploy-sd verify` on tiny models: it passes where the promise holds, and finds what breaks it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.cli.verify import (
    PLAIN,
    Cell,
    EngineVariant,
    Lengths,
    Method,
    Reference,
    make_reference,
    make_requests,
    quick_variants,
    run_alone,
    run_matrix,
)
from fastdeploy_sd.cli.verify import command as verify
from fastdeploy_sd.cli.verify.requests import with_grammars
from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import DraftTokens
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer
from tests.engine.gpu import gpu_device
from tests.models import rewrite
from tests.models.mtp_models import make_model
from tests.ops.cuda_device import EMULATED, GPU

pytestmark = pytest.mark.slow

WAY = EngineVariant("batch of 7", max_num_seqs=7, arrivals_per_step=2)
WAY_THAT_PREEMPTS = "batch 64, chunks of 16, preemption"
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
    return Method(name, speculative, lambda *_: kind(continuations(reference), vocab_size))


def test_the_reference_is_each_request_by_itself(reference: Reference) -> None:
    assert run_alone(reference.base, reference.requests[:3]) == {
        r.request_id: reference.answers[r.request_id] for r in reference.requests[:3]
    }
    assert reference.base.model.max_model_len == 512


def test_any_drafts_give_the_same_answers(reference: Reference) -> None:
    methods = [double(kind.__name__, kind, reference) for kind in (OracleProposer, WrongProposer, RandomLengthProposer)]
    seen: list[Cell] = []
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


def test_guided_requests_are_a_part_of_the_proof(golden_dir: Path) -> None:
    """What grammars force is counted apart, so a method that never drafts shows."""
    guided = make_reference(Config(ModelConfig(str(golden_dir / "llama-tiny"))), seed=0, count=12, has_guided=True)
    assert {r.request_id for r in guided.requests if r.grammar} == {"r3", "r6"}
    barren = Method("barren", replace(DRAFTING, min_ngram_size=64, max_ngram_size=64))
    matrix = run_matrix(replace(guided, requests=guided.requests[3:7:3]), [WAY], [PLAIN, barren])
    assert not matrix.differences
    assert (matrix.idle_methods, matrix.unforced_methods) == (("barren",), ())
    column = matrix.column("barren")
    assert (column.num_drafts, column.num_accepted) == (0, 0)
    assert column.num_forced > 10
    assert matrix.column(PLAIN.name).num_forced == 0
    oracle = run_matrix(guided, [WAY], [double("oracle", OracleProposer, guided)])  # asks no grammar for drafts
    assert oracle.unforced_methods == ("oracle",)
    assert not oracle.is_proof
    free = replace(guided.requests[3], grammar="")
    unguided = replace(guided, requests=(*guided.requests[:3], free, *guided.requests[4:]))
    [cell] = run_matrix(unguided, [WAY], [double("oracle", OracleProposer, guided)]).differences
    assert cell.difference is not None
    assert cell.difference.request_id == "r3"


def test_a_vocabulary_without_grammars_is_told(golden_dir: Path, tmp_path: Path) -> None:
    for path in (golden_dir / "llama-tiny").iterdir():
        if not path.name.startswith("tokenizer"):
            (tmp_path / path.name).symlink_to(path)
    reference = make_reference(Config(ModelConfig(str(tmp_path))), seed=0, count=8, has_guided=True)
    assert not any(request.grammar for request in reference.requests)
    assert reference.unguided.startswith("grammar: expected none")


def test_a_way_that_never_preempts_proves_nothing(reference: Reference) -> None:
    roomy = EngineVariant("roomy", num_blocks=1000, must_preempt=True)
    matrix = run_matrix(reference, [roomy], [double("oracle", OracleProposer, reference)])
    assert matrix.gaps == ["oracle, roomy: no preemption"]


def test_the_command_proves_a_model(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(golden_dir / "llama-tiny")
    arguments = ["verify", "--model", model, "--methods", "naive,ngram", "--num-speculative-tokens", "2", "--quick"]
    assert main(arguments) == 0
    text, told = capsys.readouterr()
    assert text.splitlines()[0].split() == ["naive", "ngram", "k=2"]
    first, second = told.splitlines()[:2]
    assert first == "verify: 64 requests alone with plain decoding, then 10 cells"
    assert re.fullmatch(r"verify: alone they took \d+ \w+; 5 ways with 2 methods, about \d+ \w+", second)
    assert "10 of 10 cells equal to plain decoding, bit for bit" in text
    assert text.endswith(", 16 of them guided by grammars\n")
    assert "DIFFERS" not in text


@pytest.mark.parametrize("kind", [EMULATED, pytest.param(GPU, marks=pytest.mark.gpu)])
def test_the_command_proves_a_model_on_a_gpu(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the emulated one a single layer, a small vocabulary, few and short requests, and one way."""
    vocab_size = 512
    path = rewrite.write_folder(tmp_path / "model", "llama-tiny", {"num_hidden_layers": 1, "vocab_size": vocab_size})
    kept = {name: t for name, t in rewrite.read("llama-tiny").items() if ".layers." not in name or ".layers.0." in name}
    tables = {name: t[:vocab_size] for name, t in kept.items() if "embed_tokens" in name or "lm_head" in name}
    rewrite.write_file(path / "model.safetensors", kept | tables)
    (path / "tokenizer.json").unlink()  # it has more tokens
    arguments = ["verify", "--model", str(path), "--device", "gpu", "--quick", "--json", "--seed", "1"]
    small = ["--requests", "4", "--prompt-tokens", "40", "--output-tokens", "17", "--way", WAY_THAT_PREEMPTS]
    with gpu_device(kind):
        status = main([*arguments, "--methods", "ngram", *(small if kind == EMULATED else [])])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["gaps"], found["warnings"]) == (0, [], [])
    assert len(found["cells"]) == (1 if kind == EMULATED else 5)


def test_requests_may_be_few_and_short() -> None:
    assert Lengths.up_to(160, 40) == Lengths()
    short = Lengths.up_to(40, 17)
    assert (short.prompt, max(short.output), short.whole) == (40, 17, 57)
    requests = make_requests(0, 12, 4096, lengths=short)
    assert max(len(r.prompt_token_ids) for r in requests) <= 40
    assert [len(r.prompt_token_ids) for r in requests[:2]] == [short.long_prompt] * 2
    assert [r.max_tokens for r in requests[:2]] == [17, 17]
    assert max(r.max_tokens for r in with_grammars(requests, 17)) == 17
    with pytest.raises(ConfigError, match=r"prompt_tokens, output_tokens: expected .*, got 160 and 3"):
        quick_variants(Lengths.up_to(160, 3))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--requests", "3"], "argument --requests: expected a whole number of 4 or more, got '3'"),
        (["--way", "batch 8"], "way: expected a part of one of these names: batch 1, chunks of 64, prefix cache; "),
    ],
)
def test_small_matrices_have_limits(
    golden_dir: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    assert main(["verify", "--model", str(golden_dir / "llama-tiny"), "--quick", *options]) == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def _no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running anything before what was asked for is known to load is a waste of hours."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the requests were run")

    monkeypatch.setattr(verify, "make_reference", refuse)
    monkeypatch.setattr(verify, "run_matrix", refuse)


@pytest.mark.usefixtures("_no_matrix")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--methods", "ngram,mtp"], "methods: expected what the model can load, got mtp k=3: "),
        (["--methods", "mtp-suffix"], "methods: expected what the model can load, got mtp-suffix k=3: "),
        (
            ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'],
            "speculative_config: expected what the model can load, got configured: ",
        ),
    ],
)
def test_what_was_asked_for_must_load(
    golden_dir: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    model = str(golden_dir / "llama-tiny")
    assert main(["verify", "--model", model, "--quick", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {text}")
    assert error.count("\n") == 1


def columns(config: Config, *options: str) -> tuple[list[Method], list[str]]:
    """The columns of a command, and those that cannot be loaded."""
    methods, reasons = verify._methods(verify._parser().parse_args(options), config)
    return methods, list(reasons)


def test_requests_of_a_mixed_batch_draft_as_far_as_the_mtp_layers_reach(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3-tiny", "numbered", num_layers=2)
    config = Config(ModelConfig(str(model.path)))
    methods, missing = columns(config, "--methods", "mtp,mixed")
    assert [m.name for m in methods] == ["mtp k=1", "mixed k=1"]
    assert (methods[-1].speculative.method, missing) == ("mtp", ["mtp k=3", "mtp k=5"])
    with pytest.raises(ConfigError, match="methods: expected what the model can load, got mtp k=3: "):
        columns(config, "--methods", "mtp", "--num-speculative-tokens", "1", "3")
    [*_, mixed], _ = columns(config, "--methods", "ngram, mixed", "--num-speculative-tokens", "4")
    assert (mixed.name, mixed.speculative.method) == ("mixed k=4", "suffix")


def test_the_suffix_cache_file_of_a_server_is_left_alone(golden_dir: Path, tmp_path: Path) -> None:
    """It is no such file, so reading it would fail too."""
    path = tmp_path / "cache"
    path.write_bytes(b"what a server keeps")
    keys = {"method": "suffix", "num_speculative_tokens": 2, "suffix_decoding_cache_file": str(path)}
    options = ["--methods", "naive", "--quick", "--speculative-config", json.dumps(keys)]
    assert main(["verify", "--model", str(golden_dir / "llama-tiny"), *options]) == 0
    assert path.read_bytes() == b"what a server keeps"


def test_a_lossy_configuration_cannot_be_proved(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2, "verify_strategy": "topp"}'
    assert main(["verify", "--model", str(golden_dir / "llama-tiny"), "--speculative-config", config]) == 2
    assert "expected verify_strategy target_match" in capsys.readouterr().err
