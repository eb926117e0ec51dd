"""One report has everything that is wrong with a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_sd.config import config_from_kwargs, load_config, verify_offline
from fastdeploy_sd.errors import ConfigError

WriteYaml = Callable[[str], str]


def report(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.message.splitlines()


def test_faults_of_file_flags_and_json_come_in_one_report(model: str, yaml_file: WriteYaml) -> None:
    path = yaml_file("max_num_seq: 4\nport: 70000\nspeculative_config: {method: mtp}\nmax_waiting_time: 4\n")
    json_text = '{"method": "ngram", "max_ngram": 2, "max_ngram_size": 0}'
    flags = ["--config", path, "--model", f"{model}/none", "--dtype", "fp8", "--speculative-config", json_text]
    assert report([*flags, "--quantization", '{"quantization": "mix_quant", "zebra": 1}', "stray"]) == [
        "11 faults in the configuration",
        f"  max_num_seq: unknown option (did you mean 'max_num_seqs'?) ({path}, line 1)",
        f"  port: expected an integer in 0..65535, got 70000 ({path}, line 2)",
        "  max_waiting_time: 4 is not supported yet in this version (only -1 is); use max_num_queued_requests to bound"
        f" the queue ({path}, line 4)",
        "  model: expected a checkpoint directory with config.json, a GGUF file, a name as 'Qwen/Qwen3-0.6B', or"
        f" 'demo', got '{model}/none' (command line)",
        "  dtype: expected one of float32, bfloat16, float16, got 'fp8' (command line)",
        "  speculative_config.max_ngram: unknown key (did you mean 'max_ngram_size'?) (command line)",
        "  speculative_config.max_ngram_size: expected an integer in 1..64, got 0 (command line)",
        "  quantization.zebra: unknown key (command line)",
        *(
            f"  quantization.{key}: expected one of none, wint8, wint4, fp8 with mix_quant, got nothing (command line)"
            for key in ("dense_quant_type", "moe_quant_type")
        ),
        "  command line: expected flags only, got 'stray' (command line)",
    ]


def test_rules_between_options_are_checked_beside_other_faults(model: str) -> None:
    flags = ["--model", model, "--port", "x", "--max-num-seqs", "64", "--max-num-batched-tokens", "63"]
    rules = ["--no-enable-chunked-prefill", "--long-prefill-token-threshold", "5"]
    assert [line.partition(":")[0].strip() for line in report([*flags, *rules])] == [
        "3 faults in the configuration",
        "port",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
    ]


def test_a_rule_about_a_faulty_option_is_not_checked(model: str) -> None:
    flags = ["--model", model, "--max-num-batched-tokens", "x", "--max-num-seqs", "4096"]
    assert report(flags) == ["max_num_batched_tokens: expected an integer of at least 1, got 'x' (command line)"]


def test_checks_of_a_section_are_among_the_faults(model: str) -> None:
    flags = ["--model", model, "--allowed-origins", "nowhere", "--api-key", "a b", "--port", "x"]
    assert [line.partition(":")[0].strip() for line in report(flags)[1:]] == ["allowed_origins", "api_key", "port"]


def test_a_value_that_the_command_line_overrides_is_no_fault(model: str, yaml_file: WriteYaml) -> None:
    path = yaml_file("max_waiting_time: 4\nport: none of this\n")
    assert load_config(["--config", path, "--model", model, "--max-waiting-time=-1", "--port", "80"]).server.port == 80


def test_keys_of_a_map_that_contradict_are_reported_beside_wrong_ones(model: str) -> None:
    keys = {"method": "ngram", "num_model_steps": 2, "verify_window": 1, "zebra": 1}
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, speculative_config=keys)
    assert [line.partition(":")[0] for line in caught.value.message.splitlines()[1:]] == [
        "  speculative_config.zebra",
        "  speculative_config.num_model_steps",
        "  speculative_config.verify_window",
    ]
    assert caught.value.param == "speculative_config"


def test_a_file_that_cannot_be_read_hides_no_other_fault_and_invents_none(tmp_path: Path) -> None:
    lines = report(["--config", str(tmp_path / "none.yaml"), "--port", "x"])
    assert lines[0] == "2 faults in the configuration"
    assert lines[1] == "  port: expected an integer in 0..65535, got 'x' (command line)"
    assert lines[2].startswith(f"  config: expected a readable YAML file, got {tmp_path}")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["port: " + "9" * 5000, "a: " + "[" * 5000, "date: 2001-99-99", "port: \x00"])
def test_any_yaml_is_read_or_a_fault(model: str, yaml_file: WriteYaml, text: str) -> None:
    line = "\n".join(report(["--model", model, "--config", yaml_file(text)]))
    assert line.startswith("config: expected valid YAML in ")
    assert len(line) < 1000


def test_a_number_of_too_many_digits_in_json_is_a_fault(model: str) -> None:
    text = '{"method": "ngram", "num_speculative_tokens": ' + "9" * 5000 + "}"
    assert "expected a JSON object" in report(["--model", model, "--speculative-config", text])[0]


def test_options_of_a_server_are_all_named_offline(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        verify_offline(config_from_kwargs(model=model, port=1, workers=2))
    assert caught.value.message.splitlines() == [
        "2 faults in the configuration",
        "  port: expected options of the engine, got one of the server (keyword argument)",
        "  workers: expected options of the engine, got one of the server (keyword argument)",
    ]


def test_an_llm_is_one_engine(model: str) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size: expected 1, as an LLM is one engine, got 2"):
        verify_offline(config_from_kwargs(model=model, data_parallel_size=2))
