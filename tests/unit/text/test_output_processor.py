"""OutputProcessor: text, cuts and reasons do not depend on how tokens were grouped into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.errors import BadRequest, InternalError, Unavailable
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.line_limits import LineLimits
from fastdeploy_sd.text.output_processor import Completion, CompletionCollector, OutputProcessor, TextDelta
from fastdeploy_sd.types import DraftLogprob, FinishReason, Request, RequestMetrics, RequestOutput, TokenLogprob
from tests.unit.text.vocabularies import golden_tokenizer

TOKENIZER = golden_tokenizer()
TEXT = "def f(x):\n    return x\n\ndef g(y):\n    return \u20ac\U0001f680 y"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)
EOS = 2


def request(**sampling: object) -> Request:
    params = SamplingParams.from_dict(sampling)
    return Request("r", np.array([5], np.int32), params, max_tokens=1000, seed=0, eos_token_ids=(EOS,))


def run(groups: Sequence[Sequence[int]], last: FinishReason, **sampling: object) -> Completion:
    """Process groups of tokens as a client would: stop after a delta with a finish_reason."""
    processor, collector = OutputProcessor(request(**sampling), TOKENIZER), CompletionCollector(0)
    for i, group in enumerate(groups):
        logprobs = tuple(TokenLogprob(t, -float(t), 1) for t in group)
        reason = last if i == len(groups) - 1 else None
        delta = processor.process(RequestOutput("r", tuple(group), logprobs, reason))
        collector.add(delta)
        if delta.finish_reason is not None:
            break
    return collector.build()


def without_metrics(completion: Completion) -> tuple[object, ...]:
    return (completion.text, completion.token_ids, completion.text_offsets, completion.logprobs,
            completion.finish_reason, completion.stop_reason)  # fmt: skip


@given(
    cuts=st.sets(st.integers(1, len(IDS) - 1)),
    stop=st.sampled_from([(), ("return",), ("n x",), (":\n    ret", "zzz"), ("\u20ac", ")")]),
    include=st.booleans(),
    min_tokens=st.integers(0, len(IDS)),
    last=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_grouping_does_not_matter(
    cuts: set[int], stop: tuple[str, ...], include: bool, min_tokens: int, last: FinishReason
) -> None:
    options = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    borders = [0, *sorted(cuts), len(IDS)]
    groups = [IDS[a:b] for a, b in pairwise(borders)]
    assert without_metrics(run(groups, last, **options)) == without_metrics(run([[i] for i in IDS], last, **options))


def test_without_stop_strings_the_whole_text_comes() -> None:
    result = run([IDS], FinishReason.LENGTH)
    assert result.text == TEXT
    assert result.token_ids == tuple(IDS)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.text_offsets[:2] == (0, len(TOKENIZER.decode(IDS[:1], skip_hidden=True)))


def test_a_stop_string_cuts_text_and_tokens_at_the_token_that_completes_it() -> None:
    result = run([IDS], FinishReason.LENGTH, stop="rn x")
    assert result.text == TEXT[: TEXT.index("rn x")]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "rn x")
    kept = TOKENIZER.decode(result.token_ids, skip_hidden=True)
    assert kept.endswith("rn x")
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids) == len(result.text_offsets)


def test_only_a_stop_string_the_engine_does_not_know_of_needs_an_abort() -> None:
    processor = OutputProcessor(request(stop="return"), TOKENIZER)
    assert processor.process(RequestOutput("r", tuple(IDS))).needs_abort
    processor = OutputProcessor(request(stop="return"), TOKENIZER)
    ended = processor.process(RequestOutput("r", tuple(IDS), None, FinishReason.LENGTH))
    assert ended.finish_reason is FinishReason.STOP
    assert not ended.needs_abort


def test_min_tokens_lets_an_early_stop_string_pass() -> None:
    first = run([IDS], FinishReason.LENGTH, stop="return")
    later = run([IDS], FinishReason.LENGTH, stop="return", min_tokens=len(first.token_ids) + 1)
    assert later.text == TEXT[: TEXT.rindex("return")]
    exact = run([IDS], FinishReason.LENGTH, stop="return", min_tokens=len(first.token_ids))
    assert exact.text == first.text


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab c")])
def test_a_stop_token_is_shown_only_on_request(include: bool, text: str) -> None:
    ids = [i for part in ("ab", " c") for i in TOKENIZER.encode(part, add_special_tokens=False)]
    processor = OutputProcessor(request(stop_token_ids=(ids[-1],), include_stop_str_in_output=include), TOKENIZER)
    delta = processor.process(RequestOutput("r", tuple(ids), None, FinishReason.STOP, stop_reason=ids[-1]))
    assert (delta.text, delta.stop_reason, delta.token_ids) == (text, ids[-1], tuple(ids))


def test_held_text_comes_out_at_the_end() -> None:
    ids = TOKENIZER.encode("the EN", add_special_tokens=False)
    assert run([ids], FinishReason.LENGTH, stop="ENDING").text == "the EN"


def test_an_error_output_is_raised_as_what_it_says() -> None:
    processor = OutputProcessor(request(), TOKENIZER)
    with pytest.raises(Unavailable, match="going down"):
        processor.process(RequestOutput("r", (), None, FinishReason.ERROR, error=("Unavailable", "going down")))
    with pytest.raises(InternalError, match="the request failed"):
        processor.process(RequestOutput("r", (), None, FinishReason.ERROR))


def test_metrics_are_the_engines_or_this_sides_clock() -> None:
    metrics = RequestMetrics(1.0, 2.0, 3.0, 4.0)
    ended = RequestOutput("r", tuple(IDS), None, FinishReason.LENGTH, metrics=metrics)
    assert OutputProcessor(request(), TOKENIZER).process(ended).metrics == metrics
    cut = OutputProcessor(request(stop="return"), TOKENIZER).process(RequestOutput("r", tuple(IDS)))
    assert cut.metrics is not None
    assert cut.metrics.first_scheduled_time == 0.0
    assert cut.metrics.finished_time >= cut.metrics.first_token_time > 0.0


@pytest.mark.parametrize(
    ("reason", "stop", "num_kept"), [(None, (), 5), (FinishReason.LENGTH, (), 4), (None, ("ef",), 1)]
)
def test_drafts_behind_the_last_token_go_with_it(
    reason: FinishReason | None, stop: tuple[str, ...], num_kept: int
) -> None:
    drafts = tuple(DraftLogprob(TokenLogprob(t, -1.0, 1), i, i < 3) for i, t in enumerate([*IDS[:3], 5, 6]))
    processor = OutputProcessor(request(stop=stop), TOKENIZER)
    delta = processor.process(RequestOutput("r", tuple(IDS[:4]), None, reason, draft_logprobs=drafts))
    assert delta.draft_logprobs == drafts[:num_kept]
    offsets = [len(TOKENIZER.decode(IDS[:i], skip_hidden=True)) for i in range(5)]
    assert delta.draft_text_offsets == tuple(offsets[:num_kept])
    assert OutputProcessor(request(), TOKENIZER).process(RequestOutput("r", (IDS[0],))).draft_logprobs is None


@given(
    at=st.integers(0, len(IDS)),
    stop=st.sampled_from([(), ("n x",), ("return y",), ("return zzz", "\u20ac\U0001f680 z"), ("\U0001f680",)]),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 1000]),
    last=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_a_sequence_goes_on_behind_what_was_shown_elsewhere(
    at: int, stop: tuple[str, ...], include: bool, min_tokens: int, last: FinishReason
) -> None:
    """Wherever it is cut, also inside a character, and inside a stop string or what looks like one."""
    options = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    params = SamplingParams.from_dict(options)
    shown, rest = IDS[:at], IDS[at:]

    def deltas(processor: OutputProcessor, token_ids: Sequence[int], is_last: bool) -> list[TextDelta]:
        found = []
        for i, token in enumerate(token_ids):
            reason = last if is_last and i == len(token_ids) - 1 else None
            found.append(processor.process(RequestOutput("r", (token,), (TokenLogprob(token, 0.0, 1),), reason)))
            if found[-1].finish_reason is not None:
                break
        return found

    one = OutputProcessor(request(**options), TOKENIZER)
    before = deltas(one, shown, is_last=not rest)
    resumed = replace(request(), sampling=params, output_token_ids=np.array(shown, np.int32))
    if before and before[-1].stop_reason is not None:
        with pytest.raises(BadRequest, match="have not ended the request"):
            OutputProcessor(resumed, TOKENIZER)
        return
    if rest:
        here, there = deltas(one, rest, True), deltas(OutputProcessor(resumed, TOKENIZER), rest, True)
        assert [replace(delta, metrics=None) for delta in here] == [replace(delta, metrics=None) for delta in there]


def limited(groups: Sequence[Sequence[int]], limits: LineLimits, **sampling: object) -> Completion:
    processor, collector = OutputProcessor(request(**sampling), TOKENIZER, line_limits=limits), CompletionCollector(0)
    for i, group in enumerate(groups):
        reason = FinishReason.STOP if i == len(groups) - 1 else None
        delta = processor.process(RequestOutput("r", tuple(group), None, reason))
        collector.add(delta)
        if delta.finish_reason is not None:
            assert delta.needs_abort == (reason is None)
            break
    return collector.build()


@pytest.mark.parametrize(
    ("text", "indent", "expected"),
    [
        ("a\n    b\n    c\n  d\n", 4, "a\n    b\n    c\n  "),
        ("a\n    b\n\n    c", 4, "a\n    b\n"),
        ("a\n\tb\nc", 1, "a\n\tb\n"),
        ("a\n    b\n    ", 4, None),
        ("a\n    b\nc", 0, None),
    ],
)
def test_a_line_with_less_indentation_ends_the_text(text: str, indent: int, expected: str | None) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    limits = LineLimits(min_indent=indent)
    alone, together = limited([[i] for i in [*ids, EOS]], limits), limited([[*ids, EOS]], limits)
    assert without_metrics(alone) == without_metrics(together)
    ended = (text, FinishReason.STOP) if expected is None else (expected, FinishReason.LENGTH)
    assert (alone.text, alone.finish_reason, alone.stop_reason) == (*ended, None)
    held = limited([[i] for i in [*ids, EOS]], limits, stop=["\nx", " x", "bx", "cx", "dx"])
    assert without_metrics(held)[:1] == without_metrics(alone)[:1], "what might become a stop string is cut alike"
    free = limited([[i] for i in [*ids, EOS]], limits, min_tokens=len(ids) + 1)
    assert (free.text, free.finish_reason) == (text, FinishReason.STOP), "min_tokens is kept"


def test_a_line_that_ends_after_its_time_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = TOKENIZER.encode("a\nb\nc\nd", add_special_tokens=False)
    clock = iter(range(1000))
    monkeypatch.setattr("fastdeploy_sd.text.output_processor.time.time", lambda: float(next(clock)))
    for limit_ms, num_lines in ((1, 1), (2500, 2), (0, 4)):
        clock = iter(range(1000))
        found = limited([[i] for i in [*ids, EOS]], LineLimits(max_ms=limit_ms))
        assert len(found.text.splitlines()) == num_lines, (limit_ms, found.text)
        assert found.text.endswith("\n") == (found.finish_reason is FinishReason.LENGTH) == (num_lines < 4)
