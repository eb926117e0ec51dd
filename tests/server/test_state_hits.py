"""A conversation with a model that has recurrent states, over HTTP: what each turn reuses, with and without drafts."""

from __future__ import annotations

import pytest

from tests.e2e.server_process import running_server
from tests.models import golden
from tests.server.test_swap import answer, metric

pytestmark = pytest.mark.slow

# The model is random, so its words are; every turn holds those before it.
TURNS = ["once upon a time there was a house " * 6, " and then the next day " * 4, " so they left the house " * 4]


def converse(method: str) -> list[tuple[str, int]]:
    """What each turn is answered, and how much of it is reused; every turn is sent twice."""
    flags = ["--model", str(golden.ROOT / "qwen3_5-tiny"), "--num-threads", "1", "--block-size", "16"]
    with running_server(*flags, "--speculative-config", f'{{"method": "{method}"}}') as server:
        text, answers = "", list[tuple[str, int]]()
        for turn in TURNS:
            text += turn
            answers += [answer(server, text), answer(server, text)]
            text += answers[-1][0]
        assert metric(server, "fastdeploy_sd:prefix_hits_lost_to_speculation_total") == 0
        used, total = (metric(server, f"fastdeploy_sd:state_snapshots{end}") for end in ("_used", ""))
        assert 0 < used <= total
    return answers


@pytest.mark.long
def test_turns_reuse_those_before_them_with_drafts_as_without() -> None:
    plain = converse("naive")
    texts, hits = [text for text, _ in plain], [count for _, count in plain]
    assert texts[::2] == texts[1::2]
    assert hits[0] == 0
    assert hits == sorted(hits)
    assert hits[-1] > 100
    assert converse("ngram") == plain
    assert converse("auto") == plain
