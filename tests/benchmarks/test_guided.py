"""What bench guided measures, on the demo model with a few tokens more; speeds are not looked at."""

from __future__ import annotations

import pytest

from benchmarks.guided import GuidedCost, guided_table, measure_answers, measure_masks, measure_steps
from benchmarks.progress import Progress
from fastdeploy_sd.cli.verify import open_engine, standard_methods
from fastdeploy_sd.cli.verify.ways import ALONE
from tests.engine.models import References


@pytest.fixture
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("models"))


def test_what_is_measured(references: References) -> None:
    masks, free_us = measure_masks(9000, tries=1)
    assert {mask.place for mask in masks} == {"forced", "few", "many"}
    assert min(free_us, *(min(m.mask_us, m.forced_us, m.draw_us) for m in masks)) > 0
    [method] = standard_methods(["ngram"], [4])
    with open_engine(references.base("demo"), ALONE, method) as engine:
        steps = measure_steps(engine, 1, 1, 2, Progress(1, "steps"))
        answers = measure_answers(engine, 1, Progress(2, "answers"))
        assert not engine.has_work()
        # Most of the JSON answer is forced.
        counts = engine.stats().drafts["grammar"]
        assert sum(counts.accepted) > 10
    cost = GuidedCost({}, 9000, masks, free_us, 1, *steps, *answers, answers[1], 2.5)
    assert "2.50 tokens per verified step" in guided_table(cost)
