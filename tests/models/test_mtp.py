"""Every draft against plain attention over the whole text: a wrong hidden row, position or slot shows up only here."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.types import I32, RequestId
from tests.models import golden
from tests.models.mtp_models import LAYOUTS, MtpReference, make_model
from tests.models.mtp_runs import Event, make_engine, make_requests, run

pytestmark = pytest.mark.slow

CLEAR_MARGIN = 1e-3
Texts = dict[RequestId, list[int]]
OTHER_LAYOUTS = [("ernie4_5_moe-tiny", "ernie-inside"), ("qwen3-tiny", "numbered-own"), ("glm4_moe-tiny", "numbered")]
OTHER_LAYOUTS += [("qwen3_5-tiny", "qwen"), ("qwen3_next-tiny", "qwen")]
OTHER_LAYOUTS += [("deepseek_v3-tiny", "numbered")]
# Lengths around the borders of blocks; the first and the last share a prefix of two blocks.
LENGTHS = (50, 1, 2, 15, 16, 40)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[I32]:
    rng = np.random.default_rng(3)
    shared = rng.integers(4, 4096, 32)
    made = [rng.integers(4, 4096, n).astype(np.int32) for n in lengths]
    for prompt in (made[0], made[-1]):
        prompt[: len(shared)] = shared[: len(prompt)]
    return made


def verify(reference: MtpReference, events: Sequence[Event], num_steps: int, at_least: int) -> None:
    """Every event drafted as many tokens as there was room for, and the right ones."""
    longest = {event.request_id: event.text for event in sorted(events, key=lambda event: len(event.text))}
    hidden = {request_id: reference.hidden(text[:-1]) for request_id, text in longest.items()}
    num_compared = 0
    for event in events:
        assert len(event.drafts) == max(0, min(num_steps, event.max_draft_len, event.num_kv_slots)), event
        if len(event.drafts) == 0:
            continue
        want = reference.drafts(event.text, len(event.drafts), hidden[event.request_id][: len(event.text) - 1])
        # What follows a near tie may differ.
        num_clear = int(np.argmin(np.append(want.margins > CLEAR_MARGIN, False)))
        num_compared += num_clear
        where = f"{event.request_id} after {len(event.text)} tokens"
        np.testing.assert_array_equal(event.drafts[:num_clear], want.token_ids[:num_clear], err_msg=where)
    assert num_compared >= at_least


@pytest.mark.parametrize(("name", "layout"), [*itertools.product(golden.FIRST, LAYOUTS[::2]), *OTHER_LAYOUTS])
def test_one_layer_drafts_what_plain_attention_does(name: str, layout: str, tmp_path: pathlib.Path) -> None:
    reference = make_model(tmp_path, name, layout)
    engine, recorder = make_engine(str(reference.path), 3)
    run(engine, make_requests(prompts((1, 33)), 5))
    verify(reference, recorder.events, 3, at_least=8)


@pytest.mark.parametrize(("name", "layout"), [("ernie4_5-tiny", "ernie-folder"), ("qwen3_moe-tiny", "numbered")])
def test_several_layers_draft_what_plain_attention_does(name: str, layout: str, tmp_path: pathlib.Path) -> None:
    reference = make_model(tmp_path, name, layout, 3)
    engine, recorder = make_engine(str(reference.path), 3)
    run(engine, make_requests(prompts((1, 2, 3, 17, 33)), 5))
    verify(reference, recorder.events, 3, at_least=20)


READINGS = [("pre_norm", "post_norm"), ("post_norm", "pre_norm"), ("pre_norm", "target"), ("post_norm", "target")]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(("hidden", "refeed"), READINGS)
def test_layers_read_the_rows_that_config_json_says(
    tmp_path: pathlib.Path, hidden: str, refeed: str, num_layers: int
) -> None:
    reference = make_model(tmp_path, "glm4_moe-tiny", "numbered", num_layers)
    reference.read_as(hidden, refeed)
    engine, recorder = make_engine(str(reference.path), 3)
    run(engine, make_requests(prompts((2, 33)), 8))
    verify(reference, recorder.events, 3, at_least=8)


def test_an_unknown_reading_is_refused(tmp_path: pathlib.Path) -> None:
    reference = make_model(tmp_path, "qwen3-tiny", "numbered")
    reference.read_as("post_norm", "none")
    with pytest.raises(CheckpointError, match=r"mtp_refeed: expected one of post_norm, pre_norm, target, got 'none'"):
        make_engine(str(reference.path), 3)


MODELS = [("ernie4_5-tiny", "ernie-folder", 1), ("llama-tiny", "numbered-own", 3)]
# Right drafts before the first wrong one, in turn: rows accept 0 to 3 of 3.
HABIT = (3, 0, 1, 2, 3, 3, 0, 2)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without-look-ahead": {"is_looking_ahead": False},
    "chunks": {"long_prefill_token_threshold": 7},
    "prefix-hits": {"enable_prefix_caching": True, "max_num_seqs": 2},
    "preempted": {"num_blocks": 8},
    "preempted-chunks-and-hits": {
        "num_blocks": 8, "enable_prefix_caching": True, "long_prefill_token_threshold": 11,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS, ids=str)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[MtpReference, Texts]:
    """A model, and what it says with plain steps."""
    reference = make_model(tmp_path_factory.mktemp("model"), *request.param)
    plain, _ = make_engine(str(reference.path), 3)
    return reference, run(plain, make_requests(prompts(), 18))


@pytest.mark.parametrize("way", WAYS)
def test_drafts_do_not_depend_on_how_a_text_came_about(known: tuple[MtpReference, Texts], way: str) -> None:
    """Drafts are judged as right or wrong in turn, so that steps commit 1 to 4 tokens and roll the rest back."""
    reference, texts = known
    todo = make_requests(prompts(), 14)
    engine, recorder = make_engine(str(reference.path), 3, **WAYS[way])
    recorder.continuations, recorder.habit = texts, HABIT
    outputs = run(engine, todo)
    assert outputs == {request_id: text[: len(outputs[request_id])] for request_id, text in texts.items()}
    assert (recorder.num_begun > len(todo)) == way.startswith("preempted")
    if "hits" in way:
        assert engine.stats().num_prefix_hit_tokens > 0
        assert engine.stats().num_prefix_lost_tokens == 0
    if way == "without-look-ahead":
        assert {0, 1, 2} <= {event.num_kv_slots for event in recorder.events}
    verify(reference, recorder.events, 3, at_least=30)
