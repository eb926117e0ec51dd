"""Who is compared, in which weight formats, and with which drafting. Knows names, not how anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
