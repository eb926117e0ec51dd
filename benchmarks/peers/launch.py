"""How each peer's worker and server are started: command, environment, model. Knows no measurements."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.catalogue import LLAMA_BIN, LLAMA_SOURCE, OURS, PEERS, PEERS_DIR, model_path, venv
from benchmarks.peers.protocol import Settings
from fastdeploy_sd.errors import ConfigError

_KV_CACHE_GB = "2"
AS_FILE = "as the file"
OUR_WEIGHTS: Mapping[str, Sequence[str]] = {
    AS_FILE: [],
    "bfloat16": ["--dtype", "bfloat16", "--quantization", "none"],
    "wint8": ["--quantization", "wint8"],
    "wint4": ["--quantization", "wint4"],
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A program to start; `environment` is added to this process's."""

    command: Sequence[str]
    environment: Mapping[str, str]


def worker(peer: str, threads: int) -> Launch:
    """The program that answers the driver's commands."""
    environment = _environment(peer, threads)
    if peer == "vllm":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # its engine in the worker itself, so that it can be stepped
        )
    return Launch([_python(peer), "-m", f"benchmarks.peers.workers.{peer}"], environment)


def server(peer: str, bits: str, port: int, settings: Settings, drafting: Sequence[str]) -> Launch:
    """The OpenAI-compatible server of a peer that has one on the checkpoint, with arguments for its drafting."""
    fmt = PEERS[peer].formats[bits]
    return model_server(peer, model_path(peer, fmt), fmt, port, settings, drafting)


def model_server(peer: str, model: Path, fmt: str, port: int, settings: Settings, drafting: Sequence[str]) -> Launch:
    """The server of a peer on a model. `fmt` is of this server's weights: a key of OUR_WEIGHTS."""
    arguments = _SERVERS[peer](model, fmt, port, settings)
    return Launch([*arguments, *drafting], _environment(peer, settings["threads"]))


def verify_ready(peer: str, bits: str) -> None:
    """Raise unless the peer is installed and has its model.

    Raises:
        ConfigError: naming what is missing and the command that makes it.
    """
    verify_installed(peer)
    model = model_path(peer, PEERS[peer].formats[bits])
    if not model.exists():
        raise ConfigError(f"peers: expected {peer}'s {bits} model at {model}, found none; run setup first")


def verify_installed(peer: str) -> None:
    """Raise ConfigError, which names the command that installs it, unless the peer is installed."""
    if not Path(_python(peer)).exists() or (peer == "llamacpp" and not (LLAMA_BIN / "llama-server").exists()):
        raise ConfigError(f"peers: expected {peer} in {PEERS_DIR / peer}, found none; run setup first")


def _python(peer: str) -> str:
    return sys.executable if peer == OURS else str(venv(peer) / "bin" / "python")


def _environment(peer: str, threads: int) -> dict[str, str]:
    environment = {"HF_HUB_OFFLINE": "1"}
    if peer == "llamacpp":
        environment |= {"LLAMA_CPP_LIB_PATH": str(LLAMA_BIN), "PYTHONPATH": str(LLAMA_SOURCE)}
    elif peer == "vllm":
        environment |= _vllm_environment(threads)
    elif peer == "transformers":
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def _vllm_environment(threads: int) -> dict[str, str]:
    """What vLLM's CPU documentation asks for: bound OpenMP threads, Intel's OpenMP and tcmalloc loaded first."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    libraries = [*sorted((PEERS_DIR / "vllm" / "tcmalloc").rglob("libtcmalloc_minimal.so.4"))]
    libraries += sorted((venv("vllm") / "lib").glob("libiomp5.so"))
    return {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "VLLM_CPU_KVCACHE_SPACE": _KV_CACHE_GB,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _ours(model: Path, fmt: str, port: int, settings: Settings) -> list[str]:
    return [
        sys.executable, "-m", "fastdeploy_sd.entrypoints.openai.api_server", "--model", str(model),
        *OUR_WEIGHTS[fmt], "--port", str(port), "--kv-cache-dtype", settings["kv_cache_dtype"],
        "--num-threads", str(settings["threads"]), "--max-num-seqs", str(settings["max_seqs"]),
        "--max-model-len", str(settings["max_len"]), "--speculative-config", "naive",
    ]  # fmt: skip


def _llamacpp(model: Path, fmt: str, port: int, settings: Settings) -> list[str]:
    del fmt
    slots, threads = settings["max_seqs"], settings["threads"]
    return [
        str(LLAMA_BIN / "llama-server"), "--model", str(model), "--port", str(port),
        "--threads", str(threads), "--parallel", str(slots), "--ctx-size", str(slots * settings["max_len"]),
    ]  # fmt: skip


def _vllm(model: Path, fmt: str, port: int, settings: Settings) -> list[str]:
    del fmt
    return [
        _python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", str(settings["max_len"]),
        "--max-num-seqs", str(settings["max_seqs"]),
    ]  # fmt: skip


_SERVERS = {OURS: _ours, "llamacpp": _llamacpp, "vllm": _vllm}
