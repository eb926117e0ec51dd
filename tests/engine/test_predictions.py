"""Predicted outputs change no byte, be they right, wrong, edited or made to mislead, by any method and way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import Reference, open_engine, quick_variants, run_cell, standard_methods
from fastdeploy_sd.types import Request
from tests.engine.models import References

pytestmark = pytest.mark.slow

MAX_PREDICTED = 200  # the references' max_model_len is a little more
TIGHT, WIDE = quick_variants()[1], quick_variants()[4]
METHODS = ["ngram", "mtp-suffix", "mixed", "auto", "auto-mtp"]
MODEL_NAMES = ["qwen3-tiny", "demo"]


def predicted(rng: random.Random, kind: int, request: Request, answer: Sequence[int], vocab_size: int) -> list[int]:
    some = [rng.randrange(vocab_size) for _ in range(MAX_PREDICTED)]
    right = list(answer)
    match kind:
        case 0:
            return right
        case 1:
            return some
        case 2:  # every few tokens one is replaced, left out or put in
            return [t for i, token in enumerate(right) for t in ([token], [token], [], [some[i], token])[(i // 4) % 4]]
        case 3:  # one token over and over
            return [right[0] if right else 0] * MAX_PREDICTED
        case 4:  # in the middle of something else, with a part of it twice
            return some[:30] + right[: len(right) // 2] + right + some[30:60]
        case _:
            return request.prompt_token_ids.tolist()


def with_predictions(reference: Reference) -> list[Request]:
    rng = random.Random(4)
    made = []
    for i, request in enumerate(reference.requests):
        answer = reference.answers[request.request_id].token_ids
        token_ids = predicted(rng, i % 7, request, answer, 128) if i % 7 else []  # one in seven predicts nothing
        made.append(replace(request, prediction_token_ids=np.array(token_ids[:MAX_PREDICTED], np.int32)))
        if i % 7 == 6:
            made[-1] = replace(made[-1], prediction_token_ids=np.array(answer, np.int32))
    return made


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_same_tokens_whatever_is_predicted(references: References, model: str, method: str) -> None:
    reference = references.get(model)
    requests = with_predictions(reference)
    [column] = standard_methods([method], [4], model_method="mtp")
    # With each method the other way for the other model.
    way = (TIGHT, WIDE)[(METHODS.index(method) + MODEL_NAMES.index(model)) % 2]
    cell = run_cell(reference.base, way, column, requests, reference.answers)
    assert (cell.difference, cell.missing) == (None, None)
    assert cell.num_accepted > 0


def test_what_was_right_is_counted(references: References) -> None:
    """Of drafts from the prediction alone; no method drafts from it where drafting is off."""
    reference = references.get("qwen3-tiny")
    [auto], [ngram] = standard_methods(["auto"], [8]), standard_methods(["ngram"], [8])
    request = max(reference.requests, key=lambda r: len(reference.answers[r.request_id].token_ids))
    answer = reference.answers[request.request_id].token_ids
    right = replace(request, prediction_token_ids=np.array(answer, np.int32))
    silent = replace(right, request_id="silent", speculation=replace(right.speculation, enabled=False))
    wrong = replace(request, request_id="wrong", prediction_token_ids=np.array([t + 1 for t in answer], np.int32) % 128)
    for method in (auto, ngram):
        with open_engine(reference.base, WIDE, method) as engine:
            counts = {}
            for asked in (right, silent, wrong):
                engine.submit(asked)
                while engine.has_work():
                    for output in engine.step():
                        if output.metrics is not None:
                            counts[asked.request_id] = output.metrics.drafts
            num_right = counts[right.request_id].num_predicted_accepted
            assert len(answer) // 2 < num_right <= counts[right.request_id].num_predicted
            assert counts["silent"].num_predicted == 0
            assert counts["wrong"].num_predicted_accepted < num_right / 4
            by_source = engine.stats().drafts["prediction"]
            assert sum(by_source.accepted) == sum(c.num_predicted_accepted for c in counts.values())
