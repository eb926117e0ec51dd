"""What a command line, a YAML file and keyword arguments become, and what is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from fastdeploy_sd.config import (
    Config,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    config_from_kwargs,
    explain,
    from_json,
    load_config,
    to_json,
)
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.draft_methods import METHODS

WriteYaml = Callable[[str], str]


def refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.message


def defaults(model: str) -> Config:
    return Config(ModelConfig(model), speculative=SpeculativeConfig("auto", METHODS["auto"].default_num_drafts))


def origin(config: Config, name: str) -> str:
    return next(row.origin for row in explain(config) if row.name == name)


def test_defaults_are_the_dataclass_defaults_but_for_drafting(model: str) -> None:
    assert load_config(["--model", model]) == defaults(model)


@pytest.mark.parametrize("spelling", ["--max-num-seqs=4", "--max_num_seqs=4", "--max-num_seqs 4", "--max_num_seqs 4"])
def test_dashes_and_underscores_are_the_same(model: str, spelling: str) -> None:
    assert load_config(["--model", model, *spelling.split()]).scheduler.max_num_seqs == 4


def test_only_the_flag_is_respelled_not_its_value(model: str) -> None:
    assert load_config(["--model", model, "--served_model_name=--a_b"]).model.served_name == "--a_b"


def test_command_line_wins_over_yaml_over_default(model: str, yaml_file: WriteYaml) -> None:
    path = yaml_file(f"model: {model}\nmax_num_seqs: 4\nblock_size: 16\n")
    config = load_config(["--config", path, "--max-num-seqs", "6"])
    assert (config.scheduler.max_num_seqs, config.cache.block_size, config.server.port) == (6, 16, 8000)
    assert origin(config, "max_num_seqs") == "command line"
    assert origin(config, "block_size") == f"{path}, line 3"
    assert origin(config, "port") == "default"


def test_yaml_takes_native_types_texts_and_dashes(model: str, yaml_file: WriteYaml) -> None:
    text = f"model: {model}\nenable-prefix-caching: False\nport: '80'\nquantization: wint8\nmax_model_len: null\n"
    config = load_config(["--config", yaml_file(text)])
    assert config.cache.enable_prefix_caching is False
    assert (config.server.port, config.model.quantization, config.model.max_model_len) == (80, "wint8", None)


def test_empty_yaml_sets_nothing(model: str, yaml_file: WriteYaml) -> None:
    assert load_config(["--config", yaml_file("# nothing\n"), "--model", model]) == defaults(model)


def test_flags_of_booleans_and_lists(model: str) -> None:
    config = load_config(["--model", model, "--no-enable-prefix-caching", "--api-key", "a", "--api-key", "b"])
    assert config.cache.enable_prefix_caching is False
    assert config.server.api_key == ("a", "b")


@pytest.mark.parametrize("name", ["num_gpu_blocks_override", "num_blocks_override"])
def test_aliases_name_the_same_option(model: str, name: str) -> None:
    assert config_from_kwargs(model=model, **{name: 100}).cache.num_blocks == 100


def test_keyword_arguments(model: str) -> None:
    config = config_from_kwargs(model=model, dtype="float32", speculative_config={"method": "naive"})
    assert config.model.dtype == "float32"
    assert origin(config, "dtype") == "keyword argument"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--max-num-seq 4", "max_num_seq: unknown option (did you mean 'max_num_seqs'?) (command line)"),
        ("--zebra 4", "zebra: unknown option (command line)"),
        ("--max-num-seqs 0", "max_num_seqs: expected an integer of at least 1, got '0' (command line)"),
        ("--max-num-seqs 4.0", "max_num_seqs: expected an integer of at least 1, got '4.0' (command line)"),
        ("--port 65536", "port: expected an integer in 0..65535, got '65536' (command line)"),
        ("--dtype fp8", "dtype: expected one of float32, bfloat16, float16, got 'fp8' (command line)"),
        (
            "--quantization int8",
            "quantization: expected one of none, wint8, wint4, fp8, a map, or null, got 'int8' (did you mean 'wint8'?)",
        ),
        ("--kv-cache-dtype fp4", "kv_cache_dtype: expected one of auto, int8, fp8, got 'fp4' (did you mean 'fp8'?)"),
        ("--block-size 48", "block_size: expected one of 16, 32, 64, 128, 256, got '48' (command line)"),
        (
            "--kv-cache-memory-gb nan",
            "kv_cache_memory_gb: expected a number of at least 0.001, or none, got 'nan' (command line)",
        ),
        ("--port", "port: expected an integer in 0..65535, got nothing (command line)"),
        ("--port 80 demo", "command line: expected flags only, got 'demo' (command line)"),
        ("--config no.yaml", "config: expected a readable YAML file, got no.yaml ([Errno 2] No such file"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(model: str, flags: str, text: str) -> None:
    assert refusal(["--model", model, *flags.split()]).startswith(text)


def test_a_missing_model_is_an_error() -> None:
    assert refusal([]) == "model: expected a non-empty string, got nothing (--model)"


def test_a_model_that_is_no_checkpoint_is_an_error(tmp_path: object) -> None:
    text = (
        "model: expected a checkpoint directory with config.json, a GGUF file, a name as 'Qwen/Qwen3-0.6B', or 'demo',"
        f" got '{tmp_path}' (command line)"
    )
    assert refusal(["--model", str(tmp_path)]) == text


def test_what_a_model_may_be_meant_to_be_is_said(tmp_path: pathlib.Path) -> None:
    assert load_config(["--model", "baidu/ERNIE-4.5-0.3B-PT"]).model.model == "baidu/ERNIE-4.5-0.3B-PT"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "model.gguf"):
        assert load_config(["--model", str(model)]).model.path == model
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "a file: give the directory it is in" in refusal(["--model", str(tmp_path / "model.safetensors")])
    assert refusal(["--model", "x" * 5000]).startswith("model: expected a checkpoint directory")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("max_num_seq: 4", "max_num_seq: unknown option (did you mean 'max_num_seqs'?) ({path}, line 2)"),
        ("port: 1\nport: 2", "port: expected once, got again as port ({path}, line 3)"),
        (
            "num_blocks_override: 1\nnum_gpu_blocks_override: 2",
            "num_gpu_blocks_override: expected once, got again as num_gpu_blocks_override ({path}, line 3)",
        ),
        ("port: true", "port: expected an integer in 0..65535, got true ({path}, line 2)"),
        ("port: [1]", "port: expected an integer in 0..65535, got [1] ({path}, line 2)"),
        ("1: 2", "config: expected option names as keys, got 1 ({path}, line 2)"),
        ("port: [", "config: expected valid YAML in {path}, got: "),
        ("speculative_config: {method: naive, method: mtp}", "config: expected valid YAML in {path}, got: line 2"),
        ("port: !!python/object/apply:os.getcwd []", "config: expected valid YAML in {path}, got: could not determine"),
    ],
)
def test_bad_yaml_is_an_error_with_its_line(model: str, yaml_file: WriteYaml, body: str, text: str) -> None:
    path = yaml_file(f"model: {model}\n{body}\n")
    assert refusal(["--config", path]).startswith(text.format(path=path))


def test_yaml_must_be_a_map(yaml_file: WriteYaml) -> None:
    assert "expected a map of options" in refusal(["--config", yaml_file("- model\n")])


def test_unknown_keyword_argument_is_an_error(model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_seqs: unknown option .*max_num_seqs.* \(keyword argument\)"):
        config_from_kwargs(model=model, max_seqs=1)


# ---- rules between options ------------------------------------------------------------------------------------------


def test_a_step_must_hold_a_token_of_every_request(model: str) -> None:
    flags = ["--model", model, "--max-num-seqs", "64", "--max-num-batched-tokens"]
    assert refusal([*flags, "63"]) == (
        "max_num_batched_tokens: expected at least max_num_seqs (64), got 63 (command line)"
    )
    assert load_config([*flags, "64"]).scheduler.max_num_batched_tokens == 64


def test_without_chunks_the_longest_prompt_must_fit_a_step(model: str) -> None:
    flags = ["--model", model, "--max-model-len", "4096"]
    whole = [*flags, "--no-enable-chunked-prefill"]
    assert refusal([*whole, "--max-num-batched-tokens", "2048"]) == (
        "max_num_batched_tokens: expected at least max_model_len (4096) when enable_chunked_prefill is off, got 2048"
        " (command line)"
    )
    assert load_config(flags).scheduler.enable_chunked_prefill


def test_without_chunks_a_step_holds_the_longest_prompt_by_default(model: str) -> None:
    flags = ["--model", model, "--no-enable-chunked-prefill", "--max-model-len"]
    config = load_config([*flags, "4096"])
    assert config.scheduler.max_num_batched_tokens == 4096
    assert origin(config, "max_num_batched_tokens") == "max_model_len without chunked prefill, command line"
    assert load_config([*flags, "512"]) == load_config([*flags, "512", "--max-num-batched-tokens", "2048"])


def test_a_prompt_threshold_needs_chunks(model: str) -> None:
    flags = ["--model", model, "--long-prefill-token-threshold"]
    assert load_config([*flags, "64"]).scheduler.long_prefill_token_threshold == 64
    assert refusal([*flags, "64", "--no-enable-chunked-prefill"]) == (
        "long_prefill_token_threshold: expected 0 when enable_chunked_prefill is off, got 64 (command line)"
    )
    assert load_config([*flags, "0", "--no-enable-chunked-prefill"]).scheduler.long_prefill_token_threshold == 0
    assert "expected an integer of at least 0, got '-1'" in refusal([*flags, "-1"])


def test_the_longest_request_must_fit_the_cache(model: str) -> None:
    flags = ["--model", model, "--max-model-len", "1024", "--num-gpu-blocks-override"]
    assert "expected room for max_model_len (1024 tokens), got 15 blocks of 64" in refusal([*flags, "15"])
    assert load_config([*flags, "16"]).cache.num_blocks == 16


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_cache_beyond_the_memory_of_the_machine_is_an_error_for_every_model(
    model: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdeploy_sd.config.rules._GPU_DRIVERS", ())
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 24 << 18, "SC_PAGE_SIZE": 4096}.__getitem__)
    flags = ["--model", model, "--device", device, "--kv-cache-memory-gb"]
    assert refusal([*flags, "500"]) == (
        "kv_cache_memory_gb: expected at most 24.0, the memory of this machine in GiB, got 500 (command line)"
    )
    assert load_config([*flags, "24"]).cache.kv_cache_memory_gb == 24


def test_the_memory_of_a_gpu_and_of_other_hosts_counts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdeploy_sd.config.rules._GPU_DRIVERS", ("/dev/null",))
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 24 << 18, "SC_PAGE_SIZE": 4096}.__getitem__)
    flags = ["--model", model, "--kv-cache-memory-gb", "48"]
    for device in ("auto", "gpu"):
        assert load_config([*flags, "--device", device]).cache.kv_cache_memory_gb == 48
    hosts = ["--device", "cpu", "--tensor-parallel-size", "2", "--ips", "127.0.0.1,127.0.0.2", "--node-rank", "0"]
    assert load_config([*flags, *hosts]).cache.kv_cache_memory_gb == 48


@pytest.mark.parametrize(("value", "num_bytes"), [("1.5", 3 << 29), ("0", 0), ("none", 0)])
def test_swap_space_is_in_gib(model: str, value: str, num_bytes: int) -> None:
    assert load_config(["--model", model, "--swap-space", value]).cache.swap_bytes == num_bytes


def test_a_second_level_needs_a_first_one_and_a_folder_a_size(model: str) -> None:
    flags = ["--model", model, "--swap-space"]
    assert refusal([*flags, "2", "--no-enable-prefix-caching"]) == (
        "swap_space: expected none when enable_prefix_caching is off, got 2 (command line)"
    )
    assert refusal([*flags, "0", "--swap-folder", "kv"]) == (
        "swap_folder: expected none without swap_space, got 'kv' (command line)"
    )
    assert load_config([*flags, "2", "--swap-folder", "kv"]).cache.swap_folder == "kv"
    assert "swap_space: expected a number of at least 0, or none, got '-1'" in refusal([*flags, "-1"])


def test_max_concurrency_bounds_running_and_waiting(model: str) -> None:
    flags = ["--model", model, "--max-num-seqs", "8", "--max-concurrency"]
    config = load_config([*flags, "20"])
    assert config.scheduler.max_num_queued_requests == 12
    assert origin(config, "max_num_queued_requests") == "max_concurrency - max_num_seqs, command line"
    assert "max_concurrency: expected more than max_num_seqs (8), got 8" in refusal([*flags, "8"])
    both = [*flags, "20", "--max-num-queued-requests", "5"]
    assert "max_concurrency: expected without max_num_queued_requests" in refusal(both)


# ---- sections constructed by hand -----------------------------------------------------------------------------------


def test_sections_check_their_fields() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: expected an integer of at least 1, got 0"):
        SchedulerConfig(max_num_seqs=0)
    with pytest.raises(ConfigError, match="max_num_seqs: expected an integer of at least 1, got '8'"):
        SchedulerConfig(max_num_seqs="8")  # type: ignore[arg-type]


def test_demo_is_the_bundled_checkpoint() -> None:
    config = ModelConfig("demo")
    assert config.path.parts[-2:] == ("fastdeploy_sd", "demo_model")
    assert (config.tokenizer_path, config.served_name) == (config.path, "demo")


# ---- JSON and secrets -----------------------------------------------------------------------------------------------


def test_json_brings_everything_back_but_secrets(model: str) -> None:
    config = load_config(["--model", model, "--api-key", "hush", "--max-num-seqs", "3", "--quantization", "wint4"])
    assert from_json(to_json(config, with_secrets=True)) == config
    back = from_json(to_json(config))
    assert back.server.api_key == ()
    assert back.origins == config.origins


def test_json_keeps_a_speculative_config() -> None:
    speculative = SpeculativeConfig("mtp", 4, quantization="none", suffix_decoding_min_token_prob=0.25)
    assert from_json(to_json(Config(ModelConfig("m"), speculative=speculative))).speculative == speculative


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"options": {"zebra": 1}, "origins": {}, "speculative": {}}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="config: expected JSON of a configuration"):
        from_json(text)


def test_secrets_are_not_shown(model: str) -> None:
    config = load_config(["--model", model, "--api-key", "hush"])
    assert "hush" not in repr(config) + to_json(config) + str(explain(config))
    assert next(row.value for row in explain(config) if row.name == "api_key") == "(hidden)"
    with pytest.raises(ConfigError) as caught:
        config_from_kwargs(model=model, api_key={"hush": 1})
    assert "hush" not in caught.value.message


def test_what_web_pages_may_do_is_written_as_here_or_as_for_vllm(model: str) -> None:
    ours = ["--allowed-origins", "https://a", "--allowed-origins", "https://b", "--allowed-methods", "POST"]
    theirs = ["--allowed-origins", '["https://a", "https://b"]', "--allowed-methods", '["POST"]']
    rest = ["--model", model, "--allow-credentials"]
    assert load_config([*ours, *rest]).server == load_config([*theirs, *rest]).server
    assert load_config([*ours, *rest]).server.allowed_headers == ("*",)
    for flags, text in (
        (["--allowed-methods", "POST"], "allowed_methods: expected it with allowed_origins only, got it alone"),
        (["--allow-credentials"], "allow_credentials: expected it with allowed_origins only, got it alone"),
        (["--allow-credentials", "--allowed-origins", "*"], "allow_credentials: expected false with the origin '*'"),
        (["--allowed-origins", '["https://a"'], "allowed_origins: expected a non-empty string or a list of them"),
        (["--allowed-origins", "[1]"], "allowed_origins: expected a non-empty string or a list of them"),
    ):
        assert refusal(["--model", model, *flags]).startswith(text)
