"""The bundled drafters of the demo model: each drafts as it was trained to, and changes nothing but the steps."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from fastdeploy_sd.config import ModelConfig, config_from_kwargs, demo_drafter
from fastdeploy_sd.engine import draft_log
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.hub import located
from fastdeploy_sd.models.checkpoint import SafetensorsFile
from fastdeploy_sd.types import I32, Request
from tests.e2e.server_process import running_server
from tests.models import rewrite
from tests.models.mtp_runs import make_engine, make_requests, run

pytestmark = pytest.mark.slow

DEMO = ModelConfig(model="demo").path
TEXT = pathlib.Path(__file__).parent / "texts" / "ferry.txt"
WIDTH, MAX_TOKENS = 256, 60
Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], Tensors]
# Drafts, and tokens per step at least.
KINDS = {
    "eagle": (3, 1.15),
    "eagle3": (3, 1.3),
    "medusa": (2, 1.15),
    "hydra": (2, 1.2),
    "mlp_speculator": (3, 1.15),
    "draft_model": (3, 1.3),
}


def prompts() -> list[I32]:
    """Four places of a program that the model was not trained on."""
    tokenizer, text = Tokenizer.from_file(str(DEMO / "tokenizer.json")), TEXT.read_text()
    begins = range(0, 4000, 1000)
    return [np.array(tokenizer.encode(text[begin : begin + 400]).ids, np.int32) for begin in begins]


def requests() -> list[Request]:
    """Greedy ones, and one that is sampled."""
    greedy = make_requests(prompts(), MAX_TOKENS, ignore_eos=True)
    return [*greedy, *(replace(r, request_id="s") for r in make_requests(prompts()[:1], MAX_TOKENS, temperature=0.8))]


def engine_of(kind: str, folder: pathlib.Path | None = None, **options: Any) -> Engine:
    model = str(folder or demo_drafter(f"demo/{kind}"))
    return make_engine("demo", KINDS[kind][0], method=kind, model=model, **options)[0]


def tokens_per_step(engine: Engine) -> float:
    stats = engine.stats()
    return stats.num_generated_tokens / stats.num_token_steps


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return run(make_engine("demo", 1, method="naive")[0], requests())


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding_in_fewer_steps(plain: dict[str, list[int]], kind: str) -> None:
    engine = engine_of(kind)
    assert run(engine, requests()) == plain
    assert tokens_per_step(engine) > KINDS[kind][1]
    assert engine.stats().misread_drafter == ""


def altered(kind: str, folder: pathlib.Path, change: Change, config: dict[str, Any] | None = None) -> pathlib.Path:
    """A copy of a drafter with other weights, or other words in config.json."""
    source = demo_drafter(f"demo/{kind}")
    assert source is not None
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | (config or {})))
    file = SafetensorsFile(source / "model.safetensors")
    rewrite.write_file(folder / "model.safetensors", change({n: np.array(file.tensor(n)) for n in file.entries}))
    return folder


def with_halves_exchanged(tensors: Tensors) -> Tensors:
    """Embedding and hidden row in the other order."""
    return {
        name: np.concatenate([t[:, WIDTH : 2 * WIDTH], t[:, :WIDTH], t[:, 2 * WIDTH :]], axis=1)
        if t.ndim == 2 and t.shape[1] >= 2 * WIDTH and "attn" not in name
        else t
        for name, t in tensors.items()
    }


def with_heads_exchanged(tensors: Tensors) -> Tensors:
    other = {"0": "1", "1": "0"}
    return {other[name[0]] + name[1:]: value for name, value in tensors.items()}


def shuffled(tensors: Tensors) -> Tensors:
    rng = np.random.default_rng(0)
    return {n: rng.permutation(t.reshape(-1)).reshape(t.shape) if t.ndim == 2 else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "change", "config"),
    [
        ("eagle", with_halves_exchanged, {}),
        ("eagle3", dict, {"norm_before_residual": True}),
        ("medusa", with_heads_exchanged, {}),
        ("hydra", with_halves_exchanged, {}),
        ("mlp_speculator", shuffled, {}),
        ("draft_model", shuffled, {}),
    ],
)
def test_another_reading_drafts_worse(
    tmp_path: pathlib.Path, kind: str, change: Change, config: dict[str, Any]
) -> None:
    """Read otherwise: so the numbers of tokens above show that the files are read as they were trained."""
    engine = engine_of(kind, altered(kind, tmp_path / "other", change, config))
    run(engine, requests())
    assert tokens_per_step(engine) < KINDS[kind][1]


@pytest.mark.parametrize("kind", [*KINDS, "mtp"])
def test_as_much_of_a_prompt_is_in_the_prefix_cache_as_without_drafts(kind: str) -> None:
    num_hit = []
    for method in (kind, "naive"):
        options: dict[str, Any] = {"method": method, "enable_prefix_caching": True}
        if method in KINDS:
            options["model"] = str(demo_drafter(f"demo/{kind}"))
        engine, _ = make_engine("demo", 2, **options)
        [request] = make_requests(prompts()[:1], 20, ignore_eos=True)
        first = run(engine, [request])["r0"]
        longer = replace(request, request_id="on", prompt_token_ids=np.array(first[:-1], np.int32))
        for again in (replace(request, request_id="again"), longer):
            run(engine, [again])
        stats = engine.stats()
        num_hit.append(stats.num_prefix_hit_tokens)
        assert stats.num_prefix_lost_tokens == 0
    assert num_hit[0] == num_hit[1] > 200


@pytest.mark.parametrize("kind", ["eagle", "hydra"])
def test_a_head_that_is_read_wrongly_is_named(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plain: dict[str, list[int]],
    kind: str,
) -> None:
    monkeypatch.setattr(draft_log, "_SECONDS_PER_LINE", 0.0)
    folder = altered(kind, tmp_path / "head", shuffled)
    engine = engine_of(kind, folder)
    with caplog.at_level(logging.WARNING, logger=draft_log.__name__):
        assert run(engine, requests()) == plain
    assert engine.stats().misread_drafter == kind
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"fewer than one in 20 drafts of {kind} is right: {folder} may be read otherwise than it was trained;"
        f" `fastdeploy-sd drafter check {folder} --model demo` tries other readings"
    ]


def test_a_server_says_that_a_head_is_read_wrongly(tmp_path: pathlib.Path) -> None:
    folder = altered("medusa", tmp_path / "heads", shuffled)
    speculative = json.dumps({"method": "medusa", "model": str(folder), "num_speculative_tokens": 2})
    with running_server("--model", "demo", "--num-threads", "1", "--speculative-config", speculative) as server:
        assert "drafter" not in httpx.get(f"{server.url}/config-info").json()
        body = {"prompt": TEXT.read_text()[:400], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120.0).json()
        assert answer["choices"][0]["speculate_metrics"]["tokens_per_step"] < 1.1
        advice = httpx.get(f"{server.url}/config-info").json()["drafter"]["value"]
        assert advice.startswith(f"fewer than one in 20 drafts of medusa is right: {folder} may be read otherwise")
        assert "fastdeploy_sd:spec_decode_drafter_misread 1.0" in httpx.get(f"{server.url}/metrics").text


def test_they_are_found_by_name_and_small() -> None:
    for kind in KINDS:
        config = config_from_kwargs(model="demo", speculative_config={"method": kind, "model": f"demo/{kind}"})
        assert located(config).speculative.model == str(DEMO / kind)
    drawn = {"auto_with_draft_model": True, "model": "demo/hydra"}
    assert located(config_from_kwargs(model="demo", speculative_config=drawn)).speculative.draft_method == "hydra"
    assert [demo_drafter(name) for name in ("demo/nothing", "demo", "demo/../demo_model", "other/eagle")] == [None] * 4
    sizes = {kind: (DEMO / kind / "model.safetensors").stat().st_size for kind in KINDS}
    assert sizes.pop("draft_model") < 2 << 20
    assert sum(sizes.values()) < 3.3e6
