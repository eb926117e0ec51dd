"""The commands of FastDeploy's page on speculative decoding, word for word but for the model's path.

Each serves here, on two ranks where it asks for four devices.
"""

from __future__ import annotations

import json
import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from fastdeploy_sd.cli import main
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig, load_config
from fastdeploy_sd.distributed.executor import create_executor
from fastdeploy_sd.llm import LLM
from fastdeploy_sd.sampling_params import SamplingParams
from tests.doubles.redis_server import running_redis
from tests.e2e.server_process import ServerProcess, running_server
from tests.server.redis_deployment import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "benchmarks" / "yaml"
TIMEOUT_S = 120.0

COMMANDS = {
    "mtp": """--tensor-parallel-size 4 --config benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'""",
    "greedy": """--speculative-config '{"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1,
        "model": "${path_to_mtp_model}"}'""",
    "accept policy": """--speculative-config '{"method": "mtp", "accept_policy": "accept_all",
        "num_speculative_tokens": 1}'""",
    "hybrid": """--speculative-config '{"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram",
        "num_speculative_tokens": 5, "model": "'$model_path'/mtp"}'""",
    "ngram": """--tensor-parallel-size 4 --config benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml
        --speculative-config '{"method": "ngram", "num_speculative_tokens": 1}'""",
    "suffix": """--tensor-parallel-size 4 --config benchmarks/yaml/eb45t-32k-wint4-mtp-h100-tp4.yaml
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64,
        "suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1}'""",
    "naive": """--tensor-parallel-size 4 --speculative-config '{"method": "naive", "num_speculative_tokens": 1}'""",
    "prefill": """--port 8180 --metrics-port 8181 --engine-worker-queue-port 8182 --cache-queue-port 8183
        --workers 2 --tensor-parallel-size 4 --quantization wint4 --splitwise-role "prefill"
        --scheduler-name "splitwise" --scheduler-host "127.0.0.1" --scheduler-port 6379 --scheduler-ttl 9000
        --scheduler-topic mtp --config benchmarks/yaml/eb45t-32k-wint4-mtp-tp4-prefill.yaml
        --scheduler-password "scheduler_mtp"
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'""",
    "decode": """--port 8190 --metrics-port 8191 --engine-worker-queue-port 8192 --cache-queue-port 8193
        --workers 2 --tensor-parallel-size 4 --quantization wint4 --splitwise-role "decode"
        --scheduler-name "splitwise" --scheduler-host "127.0.0.1" --scheduler-port 6379 --scheduler-ttl 9000
        --scheduler-topic mtp --config benchmarks/yaml/eb45t-32k-wint4-mtp-tp4-decode.yaml
        --scheduler-password "scheduler_mtp"
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}'""",
}
OTHER_FILES = ("eb45-32k-wint4-prefixcache-a800-tp4", "eb45-21b-a3b-32k-wint8-cpu-cache", "GLM45-air-32k-bf16-mtp")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with the context that the YAML files ask for."""
    folder = tmp_path_factory.mktemp("checkpoint")
    source = ModelConfig(DEMO_MODEL).path
    for entry in source.iterdir():
        if entry.name != "config.json":
            (folder / entry.name).symlink_to(entry)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return folder


def arguments(command: str, model: Path, num_devices: int = 4) -> list[str]:
    """The arguments of a command, with the test's paths in the place of the shell's variables."""
    text = command.replace("'$model_path'", str(model)).replace("${path_to_mtp_model}", f"{model}/mtp")
    text = text.replace("--tensor-parallel-size 4", f"--tensor-parallel-size {num_devices}")
    return ["--model", str(model), *shlex.split(text.replace("benchmarks/yaml/", f"{YAML}/"))]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_of_a_command_is_missing(name: str, model: Path) -> None:
    assert main(["explain-config", *arguments(COMMANDS[name], model)]) == 0


@pytest.mark.parametrize("name", OTHER_FILES)
def test_no_option_of_other_files_is_missing(name: str, model: Path) -> None:
    assert main(["explain-config", "--model", str(model), "--config", str(YAML / f"{name}.yaml")]) == 0


@pytest.mark.parametrize("name", ["greedy", "accept policy", "ngram"])
def test_an_engine_loads_as_a_command_says(name: str, model: Path) -> None:
    """In this process; a server is started by those below."""
    argv = [*arguments(COMMANDS[name], model, num_devices=1), "--num-threads", "1"]
    executor = create_executor(load_config(argv, "test"))
    try:
        speculation = executor.model_info.speculation
        assert (speculation.method, speculation.lossy) == (("ngram", False) if name == "ngram" else ("mtp", True))
    finally:
        executor.shutdown()


@pytest.mark.parametrize("name", ["mtp", "hybrid", "suffix", "naive"])
def test_a_command_serves(name: str, model: Path) -> None:
    with running_server(*arguments(COMMANDS[name], model, num_devices=2), "--num-threads", "1") as server:
        body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
        assert answer["usage"]["completion_tokens"] == 8
        methods = httpx.get(f"{server.url}/config-info", timeout=TIMEOUT_S).text
        assert server.stop() == 0
    log = "".join(server.log)
    assert ("is 0 in effect: method naive makes no drafts" in log) == (name == "naive")
    assert ("kv_cache_ratio: accepted without effect" in log) == ("--config" in COMMANDS[name])
    assert ("with_suffix" in methods) == (name == "suffix")


_SUPPLIED = 'fastdeploy_sd:supplied_kv_tokens_total{origin="prefill"}'
_STORED = 'fastdeploy_sd:swap_copies_total{end="stored"}'


@pytest.mark.long
def test_prefill_and_decode_serve_together(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is asked, the prompt is computed at one, and the answer at the other; it is that of a process alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    prompts = [f"def add_{i}(a, b):\n    return a + b\n" * 20 for i in range(2)]
    with LLM(str(model), quantization="wint4", kv_cache_memory_gb=0.1, max_model_len=4096, num_threads=1) as llm:
        answers = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)
        texts = [answer.outputs[0].text for answer in answers]
    with running_redis(tmp_path, password="scheduler_mtp") as redis, ExitStack() as stack:
        servers = []
        for name in ("prefill", "decode"):
            # The ports are free ones: those of the page may be taken.
            ports = ["--port", "0", "--metrics-port", "0", "--pd-comm-port", "0", "--scheduler-port", str(redis.port)]
            argv = [*arguments(COMMANDS[name], model, num_devices=2), *ports, "--num-threads", "1"]
            servers.append(stack.enter_context(running_server(*argv)))
        prefill, decode = servers
        until(lambda: int(redis.do("HLEN", "mtp.cluster")) == 2)
        until(lambda: _is_answered(prefill, prompts[0], texts[0]))
        until(lambda: _is_answered(decode, prompts[1], texts[1]) and _has_sample(decode, _SUPPLIED))
        assert prefill.stop() == decode.stop() == 0
        redis.wait_for_keys()


def test_the_file_with_a_second_level_of_the_prefix_cache_serves(model: Path) -> None:
    """It asks for 200 GiB; here a little of that."""
    argv = [
        *arguments(f"--tensor-parallel-size 4 --config benchmarks/yaml/{OTHER_FILES[0]}.yaml", model, num_devices=2)
    ]
    with running_server(*argv, "--swap-space", "0.05", "--num-threads", "1") as server:
        body = {"prompt": "def add(a, b):\n    return a + b\n" * 20, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
        assert answer["usage"]["completion_tokens"] == 8
        until(lambda: _has_sample(server, _STORED))
        assert server.stop() == 0


def _is_answered(server: ServerProcess, prompt: str, text: str) -> bool:
    """On a busy machine instances may not hear of each other for a while; then it is not."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    if response.status_code == 503:
        return False
    assert [choice["text"] for choice in response.json()["choices"]] == [text]
    return True


def _has_sample(server: ServerProcess, name: str) -> bool:
    """Whether a metric is above 0."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
    return re.search(rf"^{re.escape(name)} [1-9]", metrics, re.MULTILINE) is not None
