"""What the equality matrix runs on: every architecture and weight format, each with a random MTP layer."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fastdeploy_sd.cli.verify import EngineVariant, Method, Reference, make_reference, run_alone
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.spec_decode.dispatcher import create_proposer
from fastdeploy_sd.types import Request
from tests.doubles.proposers import (
    Continuations,
    OracleProposer,
    RandomTreeProposer,
    ReplacedDrafts,
    WrongProposer,
)
from tests.models import golden
from tests.models.mtp_models import layout_of, make_model

MODELS: dict[str, dict[str, Any]] = {
    **{name: {"dtype": "bfloat16"} for name in (*golden.FIRST, "glm4_moe-tiny", "gpt_oss-tiny", "deepseek_v3-tiny")},
    **{name: {"dtype": "bfloat16"} for name in ("qwen3_5-tiny", "qwen3_next-tiny", "qwen3_5_moe-tiny")},
    "seven experts": {"dtype": "float32"},
    "float32": {"dtype": "float32"},
    "wint8": {"dtype": "bfloat16", "quantization": "wint8"},
    "wint4": {"dtype": "bfloat16", "quantization": "wint4"},
    "two MTP layers": {"dtype": "bfloat16"},
    "int8 KV": {"dtype": "bfloat16"},
    "demo": {"dtype": "bfloat16"},
}
CHECKPOINTS = {
    "seven experts": "qwen3_moe-tiny", "float32": "qwen3-tiny",
    "wint8": "ernie4_5_moe-tiny", "wint4": "qwen3_moe-tiny", "two MTP layers": "qwen3-tiny",
    "int8 KV": "ernie4_5-tiny",
}  # fmt: skip
# Sums of more than two numbers have an order.
CONFIGS: dict[str, dict[str, Any]] = {"seven experts": {"num_experts_per_tok": 7}}
CACHES = {"int8 KV": CacheConfig(kv_cache_dtype="int8")}
DOUBLES = {"oracle": OracleProposer, "wrong": WrongProposer, "random": RandomTreeProposer}
# The same drafts on a server whose method runs a model: it fills its KV all the same, and what it drafted is replaced.
DOUBLES_WITH_DRAFT_KV = [f"{name} after MTP" for name in DOUBLES]
_NUM_REQUESTS = 36
_NUM_PASSES = 2
_VOCAB_SIZE = 4096
_EXTRA_TOKENS = 10


def fitted(way: EngineVariant, model: str) -> EngineVariant:
    """Return a way whose blocks are as few for a model whose windows need blocks of their own."""
    if way.num_blocks is None or model != "gpt_oss-tiny":
        return way
    return replace(way, num_blocks=2 * way.num_blocks)


class References:
    """Makes each model once per test run, with the answers of plain decoding.

    Args:
        folder: where the checkpoints go.
        device: where the engines run.
    """

    def __init__(self, folder: pathlib.Path, device: Literal["cpu", "gpu"] = "cpu") -> None:
        self._folder, self.device = folder, device
        self.base = functools.cache(self._configure)
        self.get = functools.cache(self._make)
        self.known = functools.cache(self._continue)

    def _configure(self, model: str) -> Config:
        options = ModelConfig(model=self._path(model), **MODELS[model])
        return Config(options, CACHES.get(model, CacheConfig()), device=self.device)

    def _make(self, model: str) -> Reference:
        count = _NUM_REQUESTS if model != "demo" else 24
        return make_reference(self.base(model), seed=3, count=count)

    def _path(self, model: str) -> str:
        if model == "demo":
            return model
        name = CHECKPOINTS.get(model, model)
        layout = layout_of(name)
        num_layers = 2 if model == "two MTP layers" else 1
        folder = self._folder / model.replace(" ", "-")
        folder.mkdir()
        path = make_model(folder, name, layout, num_layers).path
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | CONFIGS.get(model, {})))
        return str(path)

    def _continue(self, model: str) -> dict[str, Sequence[int]]:
        """Prompt and output of every request, some tokens past its end or limit: what an oracle knows."""
        reference = self.get(model)
        longer = [_endless(r) for r in reference.requests]
        answers = run_alone(reference.base, longer)
        texts = {r.request_id: [*r.prompt_token_ids.tolist(), *answers[r.request_id].token_ids] for r in longer}
        again = {f"{i}-again-{n}": text for i, text in texts.items() for n in range(1, _NUM_PASSES)}
        return {**texts, **again}

    def double(self, model: str, name: str, num_drafts: int) -> Method:
        """A column whose drafts have a habit; `name` is one of DOUBLES or DOUBLES_WITH_DRAFT_KV."""
        known = self.known(model)
        if name in DOUBLES:
            return double(name, num_drafts, known)
        return double_with_draft_kv(name, num_drafts, known)


def double(name: str, num_drafts: int, known: Continuations) -> Method:
    """A column of one of DOUBLES, which knows these texts."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts)
    return Method(f"{name} k={num_drafts}", speculative, lambda *_: DOUBLES[name](known, _VOCAB_SIZE))


def double_with_draft_kv(name: str, num_drafts: int, known: Continuations) -> Method:
    """A column of one of DOUBLES_WITH_DRAFT_KV."""
    kind = DOUBLES[name.split(maxsplit=1)[0]]
    speculative = SpeculativeConfig(method="mtp", num_speculative_tokens=num_drafts, num_model_steps=num_drafts)
    return Method(
        f"{name} k={num_drafts}",
        speculative,
        lambda config, context: ReplacedDrafts(create_proposer(config, context), kind(known, _VOCAB_SIZE)),
    )


def _endless(request: Request) -> Request:
    """The request with a later limit, and without an end where that changes none of its tokens."""
    sampling = request.sampling
    if sampling.min_tokens == 0:  # otherwise the ends are forbidden for a while, which shows in the tokens
        sampling = replace(sampling, ignore_eos=True, stop_token_ids=())
    return replace(request, max_tokens=request.max_tokens + _EXTRA_TOKENS, sampling=sampling)
