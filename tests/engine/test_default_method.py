"""An LLM that names no method drafts by itself, however it runs, and gives what plain decoding gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd import LLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(a"
GREEDY = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=96, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        pytest.param({"enforce_eager": True}, [GREEDY, SEEDED], id="eager"),
        # Sampled tokens differ from plain decoding's with this strategy, greedy ones do not.
        pytest.param({"speculative_config": {"verify_strategy": "topp"}}, [GREEDY], id="topp"),
    ],
)
def test_it_changes_no_token_and_no_logprob(
    options: dict[str, Any], asked: list[SamplingParams], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"model": "demo", "kv_cache_memory_gb": 0.05, "max_model_len": 512, "num_threads": 1}
    common["packed_weights_cache"] = str(tmp_path)  # where times of steps are kept, too
    found = []
    for more in (options, options | {"speculative_config": "naive"}):
        with LLM(**common, **more) as llm:
            outputs = llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
        if more is options:
            # How many is up to the times of this machine's steps.
            assert sum(sum(o.metrics.drafts.accepted) for o in outputs if o.metrics is not None) > 0
    assert found[0] == found[1]


def test_a_request_alone_is_drafted_for_as_on_a_small_server(tmp_path: Path) -> None:
    """Of 16 seats and 64 rows a step each has 3 drafts when all are taken, one alone as many as were asked for."""
    common: dict[str, Any] = {
        "model": "demo", "kv_cache_memory_gb": 0.05, "max_model_len": 512, "num_threads": 1,
        "max_num_batched_tokens": 64, "packed_weights_cache": str(tmp_path),
    }  # fmt: skip
    drafting = {"method": "ngram", "num_speculative_tokens": 24, "ngram_max_spec_factor": 9}
    alone, many, counts = [], [], []
    for num_seqs, speculation in ((2, drafting), (16, drafting), (16, "naive")):
        with LLM(**common, max_num_seqs=num_seqs, speculative_config=speculation) as llm:
            first = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
            rest = llm.generate([PROMPT[i:] for i in range(16)], [GREEDY, SEEDED] * 8, use_tqdm=False)
        alone.append(first.outputs[0])
        many.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in rest])
        counts.append(None if first.metrics is None else first.metrics.drafts)
    assert counts[0] == counts[1]
    assert counts[1] is not None
    assert len(np.trim_zeros(counts[1].accepted, "b")) > 4 > 64 // 16 - 1
    assert [(o.token_ids, o.logprobs) for o in alone] == [(alone[2].token_ids, alone[2].logprobs)] * 3
    assert many == [many[2]] * 3
