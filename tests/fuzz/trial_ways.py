"""The ways in which random requests are computed, as servers: the baseline, and all that must give the same bytes."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.split_deployment import ModelServer, SplitDeployment

_COUNTERS = {
    "preemptions": "fastdeploy:request_preempted_total ",
    "accepted drafts": "fastdeploy:spec_decode_num_accepted_tokens_total ",
    "prefix-hit tokens": "fastdeploy:prefix_cache_token_num_total ",
    "blocks copied back": 'fastdeploy_sd:swap_copies_total{end="loaded"}',
    "requests that waited for KV": "fastdeploy_sd:kv_arrivals_total ",
}


@dataclass(frozen=True)
class Way:
    """One way of computing requests.

    Attributes:
        options: of the server that clients reach.
        methods: drafting methods that a request may name there.
        max_drafts: the largest number of drafts that a request may name there; 0 = requests say nothing of drafting.
        prefill: options of an instance that computes the prompts for it, with a router before the two.
        has_priorities: requests name a priority.
    """

    name: str
    options: Mapping[str, Any]
    methods: tuple[str, ...] = ()
    max_drafts: int = 0
    prefill: Mapping[str, Any] | None = None
    has_priorities: bool = False

    def fields(self, rng: random.Random) -> dict[str, Any]:
        """Return fields of a body that must not change its answer, as the server takes them."""
        fields: dict[str, Any] = {}
        if rng.random() < 0.5:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.has_priorities:
            fields["priority"] = rng.randint(-4, 4)
        if self.max_drafts and rng.random() < 0.7:
            limit = {"num_speculative_tokens": rng.randint(1, self.max_drafts)}
            named = [{"method": method} for method in self.methods]
            fields["speculation"] = rng.choice([{"enabled": False}, limit, *named, *(n | limit for n in named)])
        return fields


# Of all servers: a longer request is refused by all, and one of this length fits into the smallest cache.
_MAX_MODEL_LEN = 640
_FEW = {"block_size": 16, "max_num_seqs": 16}
_AUTO = ("ngram", "suffix", "auto")
BASELINE = Way(
    "baseline",
    {
        "speculative_config": {"method": "naive"},
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "async_scheduling": False,
    },
)
WAYS = {
    way.name: way
    for way in (
        Way("default", {}, _AUTO, 32),
        Way(
            "ngram",
            {**_FEW, "num_gpu_blocks_override": 41, "long_prefill_token_threshold": 13, "max_num_batched_tokens": 96,
             "scheduling_policy": "priority",
             "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "min_ngram_size": 1}},
            ("ngram",), 5, has_priorities=True,
        ),
        Way(
            "suffix",
            {**_FEW, "block_size": 32, "num_gpu_blocks_override": 21, "max_num_batched_tokens": 160,
             "scheduling_policy": "priority",
             "speculative_config": {"method": "suffix", "num_speculative_tokens": 8}},
            ("suffix",), 8, has_priorities=True,
        ),
        Way(
            "auto",
            {**_FEW, "num_gpu_blocks_override": 41, "scheduling_policy": "priority", "swap_space": 0.02,
             "max_num_batched_tokens": 512},
            _AUTO, 32, has_priorities=True,
        ),
        Way(
            "split",
            {**_FEW, "num_gpu_blocks_override": 41, "max_num_batched_tokens": 128,
             "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
            ("ngram",), 4,
            prefill={**_FEW, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 100},
        ),
        Way(
            "ranks",
            {**_FEW, "num_gpu_blocks_override": 41, "max_num_batched_tokens": 112, "tensor_parallel_size": 2,
             "num_threads": 2, "speculative_config": {"method": "suffix", "num_speculative_tokens": 6}},
            ("suffix",), 6,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A way whose servers run.

    Attributes:
        url: where clients send.
    """

    url: str
    server: ModelServer

    def counts(self) -> dict[str, int]:
        """What the server that computes the answers has counted so far."""
        return {name: int(self.server.metric(sample)) for name, sample in _COUNTERS.items()}


@contextlib.contextmanager
def serving(way: Way, model: str, **options: Any) -> Iterator[Served]:
    """Start the servers of a way, and see all of them end well; `options` are those of every server."""
    common = {"max_model_len": _MAX_MODEL_LEN, **options}
    with SplitDeployment(model, **common) as deployment:
        if way.prefill is None:
            server = deployment.server("mixed", **way.options)
            yield Served(server.url, server)
        else:
            router = deployment.router()
            prefill = deployment.server("prefill", **way.prefill)
            server = deployment.server("decode", **way.options)
            deployment.wait_for(prefill, server)
            yield Served(router.url, server)
        server.wait_idle()
        deployment.stop()


def refusal(way: Way, model: Path) -> str:
    """Why a model cannot be computed in a way, "" = it can."""
    size = int(way.options.get("tensor_parallel_size", 1))
    config = json.loads((model / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if num_heads % size == num_kv_heads % size == 0:
        return ""
    return f"{num_heads} heads and {num_kv_heads} KV heads are not parts for {size} ranks"
