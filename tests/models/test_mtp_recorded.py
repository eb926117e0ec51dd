"""Recorded passes of draft layers draft what eager ones draft, after the same text and as surely."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.runtime.device import DEVICE
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import DraftTokens, Request
from tests.models.mtp_models import make_model
from tests.models.mtp_runs import make_engine, make_requests, run

Drafts = list[tuple[list[int], list[int], np.ndarray]]


def requests() -> list[Request]:
    """More than run at once, with prompts that take one step and several."""
    rng = np.random.default_rng(0)
    return make_requests([rng.integers(4, 4096, n).astype(np.int32) for n in (3, 40, 17, 65, 1, 30)], 25)


def drafts_of(model: pathlib.Path, num_steps: int, **options: Any) -> tuple[dict[str, list[int]], Drafts]:
    """What a server says, and every step's drafts with their log-probabilities."""
    engine, recorder = make_engine(
        str(model), num_steps, dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=48, num_blocks=24,
        enable_prefix_caching=True, draft_head_quantization="auto", enable_draft_logprob=True, **options,
    )  # fmt: skip
    sound, found = recorder.proposer, Drafts()

    class Noted:
        """The proposer, with log-probabilities asked for in every other step."""

        def __getattr__(self, name: str) -> Any:
            return getattr(sound, name)

        def propose(self, x: ProposeInput) -> DraftTokens:
            wanted = np.full(len(x.table_rows), 2, np.int32) if len(found) % 2 == 0 else None
            drafts = sound.propose(replace(x, num_draft_logprobs=wanted))
            logprobs = np.zeros(0) if drafts.logprobs is None else drafts.logprobs.top_logprobs.copy()
            found.append((drafts.token_ids.tolist(), drafts.cu_num_draft.tolist(), logprobs))
            return drafts

    recorder.proposer = Noted()
    return run(engine, requests()), found


def test_recordings_for_all_numbers_of_drafts_share_one_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that return logits."""
    arenas = list[int]()
    sound = DEVICE.arena

    def noted(num_bytes: int) -> Any:
        arenas.append(num_bytes)
        return sound(num_bytes)

    monkeypatch.setattr(DEVICE, "arena", noted)
    drafts_of(make_model(tmp_path, "qwen3-tiny", "numbered", 1).path, 3)
    assert len(arenas) == 1


@pytest.mark.parametrize(
    ("layout", "num_layers", "num_steps"),
    [("ernie-folder", 1, 1), ("ernie-folder", 1, 3), ("numbered", 1, 3), ("numbered", 2, 2), ("ernie-inside", 3, 3)],
)
def test_recorded_passes_draft_what_eager_ones_do(
    layout: str, num_layers: int, num_steps: int, tmp_path: pathlib.Path
) -> None:
    name = "ernie4_5-tiny" if layout.startswith("ernie") else "qwen3-tiny"
    path = make_model(tmp_path, name, layout, num_layers).path
    texts, drafts = drafts_of(path, num_steps)
    eager_texts, eager_drafts = drafts_of(path, num_steps, enforce_eager=True)
    assert texts == eager_texts
    assert len(drafts) == len(eager_drafts)
    assert any(len(logprobs) for *_, logprobs in drafts)
    for (token_ids, starts, logprobs), (eager_ids, eager_starts, eager_logprobs) in zip(
        drafts, eager_drafts, strict=True
    ):
        assert (token_ids, starts) == (eager_ids, eager_starts)
        np.testing.assert_array_equal(logprobs, eager_logprobs)
