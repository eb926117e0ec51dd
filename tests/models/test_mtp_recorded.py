"""Recorded passes of draft layers draft what eager ones draft, after the same text and as surely."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.device import Device
from fastdeploy_sd.spec_decode.proposer import DraftProbabilities, ProposeInput
from fastdeploy_sd.types import DraftTokens, Request
from tests.models.mtp_models import make_model
from tests.models.mtp_runs import make_engine, make_requests, run

pytestmark = pytest.mark.slow

Drafts = list[tuple[list[int], list[int], np.ndarray]]


def requests() -> list[Request]:
    """More than run at once, with prompts that take one step and several."""
    rng = np.random.default_rng(0)
    return make_requests([rng.integers(4, 4096, n).astype(np.int32) for n in (3, 40, 17, 65, 1, 30)], 25)


def drafts_of(
    model: pathlib.Path, num_steps: int, min_survival: float = -1.0, **options: Any
) -> tuple[dict[str, list[int]], Drafts]:
    """What a server says, and every step's drafts with their log-probabilities.

    Args:
        min_survival: of every other request, where it is not negative; of the others 0. Then the drafts' probabilities
            stand in place of log-probabilities.
    """
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
            asked = None
            if min_survival >= 0:
                least = np.where(np.arange(len(x.table_rows)) % 2, min_survival, 0).astype(np.float32)
                asked = DraftProbabilities(least, np.zeros(int(x.max_draft_len.sum()), np.float32), x.max_draft_len)
            drafts = sound.propose(replace(x, num_draft_logprobs=wanted, probabilities=asked))
            logprobs = np.zeros(0) if drafts.logprobs is None else drafts.logprobs.top_logprobs.copy()
            if asked is not None:
                if drafts.logprobs is not None:
                    chosen = np.exp(drafts.logprobs.logprobs)
                    np.testing.assert_allclose(asked.draft_prob[: len(chosen)], chosen, rtol=1e-5)
                logprobs = asked.draft_prob
            found.append((drafts.token_ids.tolist(), drafts.cu_num_draft.tolist(), logprobs))
            return drafts

    recorder.proposer = Noted()
    return run(engine, requests()), found


def test_recordings_for_all_numbers_of_drafts_share_one_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that return logits."""
    arenas = list[int]()
    sound = Device.arena

    def noted(self: Device, num_bytes: int) -> Any:
        arenas.append(num_bytes)
        return sound(self, num_bytes)

    monkeypatch.setattr(Device, "arena", noted)
    drafts_of(make_model(tmp_path, "qwen3-tiny", "numbered", 1).path, 3)
    assert len(arenas) == 1


@pytest.mark.parametrize(
    ("layout", "num_layers", "num_steps", "min_survival", "draft_p_min"),
    [
        ("numbered-own", 1, 3, -1.0, 0.0),  # read otherwise than others
        ("ernie-folder", 1, 1, -1.0, 0.0),
        ("ernie-folder", 1, 3, -1.0, 0.0),
        ("ernie-folder", 1, 3, 1e-4, 0.0),
        ("numbered", 1, 3, -1.0, 7.8e-4),
        ("numbered", 2, 2, -1.0, 7.8e-4),
        ("ernie-inside", 3, 3, -1.0, 0.0),
    ],
)
def test_recorded_passes_draft_what_eager_ones_do(
    layout: str, num_layers: int, num_steps: int, min_survival: float, draft_p_min: float, tmp_path: pathlib.Path
) -> None:
    """Also where requests stop drafting before others do."""
    name = "ernie4_5-tiny" if layout.startswith("ernie") else "qwen3-tiny"
    model = make_model(tmp_path, name, layout, num_layers)
    if layout == "numbered-own":
        model.read_as("pre_norm", "target")
    path = model.path
    texts, drafts = drafts_of(path, num_steps, min_survival, draft_p_min=draft_p_min)
    eager_texts, eager_drafts = drafts_of(path, num_steps, min_survival, draft_p_min=draft_p_min, enforce_eager=True)
    assert texts == eager_texts
    assert len(drafts) == len(eager_drafts)
    assert any(len(logprobs) for *_, logprobs in drafts)
    if min_survival >= 0 or draft_p_min > 0:
        lengths = {count for _, starts, _ in drafts for count in np.diff(starts).tolist()}
        assert lengths == set(range(num_steps + 1))
    for (token_ids, starts, logprobs), (eager_ids, eager_starts, eager_logprobs) in zip(
        drafts, eager_drafts, strict=True
    ):
        assert (token_ids, starts) == (eager_ids, eager_starts)
        np.testing.assert_array_equal(logprobs, eager_logprobs)
