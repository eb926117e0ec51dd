"""Several models of one server: how they are written, what they share, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy_sd.config import config_from_kwargs, from_json, load_configs, to_json
from fastdeploy_sd.engine.ipc.engine_process import engine_addresses, engine_config
from fastdeploy_sd.errors import ConfigError

TWO = [
    "--models",
    "small=demo",
    "--models",
    '{"big": {"model": "demo", "served_model_name": "also", "max-num-seqs": 4}}',
]


def faults(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_configs(argv)
    lines = caught.value.message.splitlines()
    return lines if len(lines) == 1 else [line.strip() for line in lines[1:]]


def test_a_model_has_its_own_options_over_those_of_all(tmp_path: Path) -> None:
    small, big = load_configs([*TWO, "--max-num-seqs", "8", "--port", "0"])
    assert (small.model.served_names, big.model.served_names) == (("small",), ("big", "also"))
    assert (small.scheduler.max_num_seqs, big.scheduler.max_num_seqs) == (8, 4)
    assert small.server == big.server
    assert (small.server.port, big.origins["max_num_seqs"]) == (0, "models.big, command line")
    file = tmp_path / "models.yaml"
    file.write_text("port: 0\nmax_num_seqs: 8\nmodels:\n  small: demo\n  big:\n    model: demo\n    max_num_seqs: 4\n")
    assert [c.scheduler.max_num_seqs for c in load_configs(["--config", str(file)])] == [8, 4]
    (alone,) = load_configs(["--config", str(file), "--models", "one=demo"])
    assert (alone.model.served_name, alone.parallel.engines_on_host) == ("one", 1)
    assert len(load_configs(["demo"])) == 1


def test_models_have_roles_of_their_own() -> None:
    models = {
        "a": {"model": "demo", "splitwise_role": "prefill", "pd_comm_port": 7000},
        "b": {"model": "demo", "pd_comm_port": 7000},
        "c": "demo",
    }
    configs = load_configs(["--models", json.dumps(models), "--splitwise-role", "decode", "--pd-secret", "s" * 16])
    assert [config.splitwise.splitwise_role for config in configs] == ["prefill", "decode", "decode"]
    assert {config.splitwise.pd_secret for config in configs} == {"s" * 16}


def test_the_host_is_divided_among_the_engines_of_all_models() -> None:
    models = {"a": "demo", "b": {"model": "demo", "data_parallel_size": 2, "tensor_parallel_size": 2}, "c": "demo"}
    configs = load_configs(["--models", json.dumps(models)])
    assert [config.parallel.engines_on_host for config in configs] == [4, 4, 4]
    engines = [engine_config(c, number).parallel for c in configs for number in range(c.parallel.num_local_engines)]
    assert [engine.place_on_host for engine in engines] == [0, 1, 2, 3]
    assert [engine.first_rank for engine in engines] == [0, 1, 3, 5]
    assert engine_addresses(configs, "x") == [["x-0"], ["x-1", "x-2"], ["x-3"]]
    assert engine_addresses(configs[:1], "x") == [["x"]]
    assert from_json(to_json(configs[1])).parallel == configs[1].parallel


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--models", "a=demo", "--models", "a=demo"],
            "models: expected every name once, got 'a' again (command line)",
        ),
        (["--models", "=demo"], "models: expected names of models, as NAME=MODEL, got ['=demo'] (command line)"),
        (["--models", "demo"], "models: expected a JSON object, got text that is none"),
        (["demo", *TWO], "model: expected none, as models has one of each model, got 'demo' (command line)"),
        (
            [*TWO, "--served-model-name", "x"],
            "served_model_name: expected none, as models has one of each model, got ['x'] (command line)",
        ),
        (
            ["--models", '{"a": {"model": "demo", "port": 3}}'],
            "models.a.port: expected outside of models, as all share it, got it of one model (command line)",
        ),
        (["--models", '{"a": {"max_num_seqs": 3}}'], "models.a.model: expected a non-empty string, got nothing"),
        (["--models", '{"a": 3}'], "models.a: expected a model, or a map of its options, got 3 (command line)"),
        (["--models", "a=demo", "--models", "b=none"], "model: expected a checkpoint directory"),
        (
            ["--models", "also=demo", *TWO],
            "models.big.served_model_name: expected names of one model, as 'also' has it too, got 'also'",
        ),
        (
            ["--models", '{"a": {"model": "demo", "lora_modules": "b=/x"}}', "--models", "b=demo"],
            "models.b.served_model_name: expected names of one model, as 'a' has it too, got 'b'",
        ),
        (
            [*TWO, "--lora-modules", "tuned=/x"],
            "models.big.lora_modules: expected names of one model, as 'small' has it too, got 'tuned'",
        ),
        (
            [*TWO, "-tp", "2", "--ips", "127.0.0.1,127.0.0.2"],
            "ips: expected none with several models (give the model a command of its own, with the same router), got",
        ),
        (
            ["--models", '{"a": {"model": "demo", "pd_secret": "0123456789abcdef"}}'],
            "models.a.pd_secret: expected outside of models, as all share it, got it of one model",
        ),
        (
            [*TWO, "--splitwise-role", "prefill", "--pd-comm-port", "7000"],
            "models.big.pd_comm_port: expected ports of one model, as 'small' has it too, got 7000",
        ),
        (
            [
                "--models",
                '{"a": {"model": "demo", "splitwise_role": "decode", "rdma_comm_ports": "7001,7004"}}',
                "--models",
                '{"b": {"model": "demo", "splitwise_role": "prefill", "pd_comm_port": 7003, "data_parallel_size": 2}}',
            ],
            "models.b.pd_comm_port: expected ports of one model, as 'a' has it too, got 7003",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(argv: list[str], expected: str) -> None:
    (text,) = faults(*argv)
    assert text.startswith(expected)


def test_all_faults_are_told_at_once_and_one_model_is_wanted_elsewhere() -> None:
    models = {name: {"model": "demo", "max_num_seqs": -1} for name in "ab"}
    found = faults("--models", json.dumps(models), "--port", "x")
    assert sorted(text.partition(":")[0] for text in found) == ["max_num_seqs", "max_num_seqs", "port"]
    assert {text.rpartition("(")[2] for text in found} >= {"models.a, command line)", "models.b, command line)"}
    with pytest.raises(ConfigError, match="models: expected none, as one model is wanted here"):
        config_from_kwargs(models={"a": "demo"})
