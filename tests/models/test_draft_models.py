"""Two draft models of different kinds on one server: MTP, and one that the package does not know."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.types import DraftSource, Request, Speculation
from fastdeploy_sd.types.draft_methods import METHODS, DraftMethod
from tests.doubles.early_exit import EARLY_EXIT
from tests.models.mtp_models import make_model
from tests.models.mtp_runs import make_engine, make_requests, run

pytestmark = pytest.mark.slow

NUM_STEPS, NUM_PROMPTS = 3, 2
METHOD_NAMES = ("mtp", EARLY_EXIT.name)
_MTP = METHODS["mtp"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, METHOD_NAMES)


def register(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Make these the draft models that a server loads for the method that chooses."""
    methods = cast(MutableMapping[str, DraftMethod], METHODS)
    for method in (_MTP, EARLY_EXIT):
        auto_key = "auto_with_mtp" if method.name in names else ""
        monkeypatch.setitem(methods, method.name, replace(method, auto_key=auto_key))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model"), "qwen3-tiny", "numbered").path)


def requests(methods: Sequence[str]) -> list[Request]:
    """The same prompts for every method, so that a prefix cache could mix their KV up."""
    prompts = [np.random.default_rng(n).integers(4, 4096, n).astype(np.int32) for n in (40, 33)]
    made = make_requests(prompts, 12)
    return [
        replace(request, request_id=f"{method} {request.request_id}", speculation=Speculation(method=method))
        for method in methods
        for request in made
    ]


def drafted(
    model: str, asked: Sequence[Request], **options: Any
) -> tuple[dict[tuple[str, int], list[int]], dict[str, list[int]]]:
    """What was drafted for whom after how many tokens, and what came out."""
    engine, recorder = make_engine(model, NUM_STEPS, method="auto", auto_with_mtp=True, **options)
    outputs = run(engine, asked)
    return {(event.request_id, len(event.text)): event.drafts.tolist() for event in recorder.events}, outputs


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"enable_prefix_caching": True, "max_num_seqs": 1}])
def test_each_drafts_for_its_requests_what_it_drafts_alone(
    model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a prefix cache, too: a prompt that one model has run is a hit for its own requests alone."""
    both, outputs = drafted(model, requests(METHOD_NAMES), **options)
    found = []
    for method in METHOD_NAMES:
        register(monkeypatch, [method])
        own, own_outputs = drafted(model, requests([method]), **options)
        assert {key: drafts for key, drafts in both.items() if key[0].startswith(method)} == own
        assert {name: text for name, text in outputs.items() if name.startswith(method)} == own_outputs
        found.append({(name.split()[1], length): drafts for (name, length), drafts in own.items() if drafts})
    common = found[0].keys() & found[1].keys()
    assert any(found[0][key] != found[1][key] for key in common)
    assert len({tuple(text) for text in outputs.values()}) == NUM_PROMPTS  # the method decides no token


def test_drafts_name_their_source(model: str) -> None:
    engine, recorder = make_engine(model, NUM_STEPS, method="auto", auto_with_mtp=True)
    found, propose = set[tuple[str, int]](), recorder.proposer.propose

    def noted(x: Any) -> Any:
        drafts = propose(x)
        for r, request_id in enumerate(x.request_ids):
            if drafts.sources is not None:
                begin, end = drafts.cu_num_draft[r : r + 2]
                found.update((request_id.split()[0], source) for source in drafts.sources[begin:end].tolist())
        return drafts

    recorder.proposer.propose = noted  # type: ignore[method-assign]
    run(engine, requests(METHOD_NAMES))
    assert found == {("mtp", int(DraftSource.MTP)), (EARLY_EXIT.name, int(DraftSource.CUSTOM))}


def test_the_name_of_a_configuration_names_its_models() -> None:
    config = SpeculativeConfig("auto", auto_with_mtp=True)
    assert (config.draft_models, config.label) == (METHOD_NAMES, f"auto-mtp-{EARLY_EXIT.name}")
