"""Which peers are compared: weight formats, drafting methods, files, and how much of each metric is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BITS = ("bf16", "8-bit", "4-bit")
OURS = "ours"


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One server or library.

    Attributes:
        title: in tables.
        formats: bits -> what the peer calls its weights of that size.
        has_server: whether it answers OpenAI's completions; the others are driven in process only.
        drafting: name -> option of every way to draft that is tried, the most promising first, as the peer wants it:
            server arguments, or arguments of its generate call.
    """

    title: str
    formats: Mapping[str, str]
    has_server: bool
    drafting: Mapping[str, Any] = field(default_factory=dict)


PEERS: Mapping[str, PeerInfo] = {
    OURS: PeerInfo(
        "fastdeploy_sd",
        {"bf16": "bfloat16", "8-bit": "wint8", "4-bit": "wint4"},
        has_server=True,
        drafting={
            "ngram, 8 drafts": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8}'],
            "ngram, 11 drafts": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 11}'],
        },
    ),
    "llamacpp": PeerInfo(
        "llama.cpp",
        {"bf16": "bf16", "8-bit": "q8_0", "4-bit": "q4_0"},
        has_server=True,
        drafting={
            "ngram-simple, 8 drafts": [
                "--spec-type", "ngram-simple",
                "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8",
            ],
            "ngram-mod, 2 to 8 drafts": [
                "--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "4",
                "--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "8",
            ],
        },
    ),
    "openvino": PeerInfo(
        "OpenVINO GenAI",
        {"bf16": "fp16", "8-bit": "int8", "4-bit": "int4"},
        has_server=False,
        drafting={
            "prompt lookup, 8 drafts": {"num_assistant_tokens": 8, "max_ngram_size": 3},
            "prompt lookup, 11 drafts": {"num_assistant_tokens": 11, "max_ngram_size": 3},
        },
    ),
    "vllm": PeerInfo(
        "vLLM (CPU)",
        {"bf16": "bf16"},
        has_server=True,
        drafting={
            "ngram, 8 drafts": [
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
            ],
        },
    ),
    "transformers": PeerInfo(
        "HF transformers",
        {"bf16": "bf16"},
        has_server=False,
        drafting={"prompt lookup, 8 drafts": {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}},
    ),
}  # fmt: skip


IN_PROCESS = ("decode", "prefill", "forward")
METRICS = (*IN_PROCESS, "http", "speculation")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run; the defaults take about 25 minutes for all peers.

    Attributes:
        batches: sequences that decode together.
        prompt_len: of decoded sequences. steps: decoded per round and peer.
        prefill_len: of prompts whose computation is timed.
        rows, contexts: of forward passes. repeats: of each per round.
        concurrency: requests in flight over HTTP. http_requests: sent in all at least. output_len: of each.
        copy_prompts, copy_output_len: of the speculation metric. max_drafters: ways of drafting tried per peer.
        rounds: turns of the peers, server_rounds: over HTTP.
    """

    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    prompt_len: int = 128
    steps: int = 12
    prefill_len: int = 512
    rows: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32)
    contexts: tuple[int, ...] = (512, 4096)
    repeats: int = 2
    concurrency: tuple[int, ...] = (1, 8)
    http_requests: int = 2
    output_len: int = 64
    copy_prompts: int = 1
    copy_output_len: int = 240
    max_drafters: int = 2
    rounds: int = 4
    server_rounds: int = 2

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence of any metric, with room for the tokens of forward passes."""
        tail = (self.rounds + 1) * (self.repeats + 1) * sum(self.rows)
        return -(-(max(self.contexts) + tail) // 256) * 256

    def num_requests(self, concurrency: int) -> int:
        """Requests of one turn over HTTP."""
        return max(concurrency, self.http_requests)

    def num_rounds(self, metric: str) -> int:
        """Rounds of a metric at one number of bits."""
        counts = {
            "decode": len(self.batches) * self.rounds,
            "prefill": self.rounds,
            "forward": len(self.contexts) * self.rounds,
            "http": len(self.concurrency) * self.server_rounds,
            "speculation": self.server_rounds,
        }
        return counts[metric]


QUICK_PEERS = ("ours", "llamacpp", "openvino")
QUICK_METRICS = ("decode", "prefill", "forward", "speculation")
QUICK = Plan(
    batches=(1, 8),
    steps=8,
    rows=(1, 5, 8),
    contexts=(512,),
    copy_output_len=120,
    max_drafters=1,
    rounds=2,
    server_rounds=1,
)


ROOT = Path(__file__).resolve().parents[2]
PEERS_DIR = ROOT / "build" / "peers"
CHECKPOINT = PEERS_DIR / "checkpoint"
RESULTS_DIR = PEERS_DIR / "results"
REQUIREMENTS_DIR = Path(__file__).resolve().parent / "requirements"
LLAMA_DIR = PEERS_DIR / "llamacpp"
LLAMA_VERSION = "0.3.36"
LLAMA_SOURCE = LLAMA_DIR / f"llama_cpp_python-{LLAMA_VERSION}"
LLAMA_BIN = LLAMA_DIR / "build" / "bin"


def venv(peer: str) -> Path:
    """The virtual environment of a peer."""
    return PEERS_DIR / peer / "venv"


def model_path(peer: str, fmt: str) -> Path:
    """What a peer loads for a weight format of its own naming, e.g. ("llamacpp", "q8_0")."""
    if peer == "llamacpp":
        return LLAMA_DIR / f"{fmt}.gguf"
    if peer == "openvino":
        return PEERS_DIR / peer / fmt
    return CHECKPOINT
