"""What a model thought is taken out of its answer: the same parts however its text is cut, and exact token counts."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.reasoning import ThoughtCounter, ThoughtSplitter
from fastdeploy_sd.text.reasoning_formats import (
    FORMATS,
    NAMES,
    Display,
    ReasoningFormat,
    ReasoningOptions,
    Start,
    find_format,
)

THINK, ERNIE = FORMATS["qwen3"], FORMATS["ernie_x1"]
MAYBE, INSIDE, BEHIND = Start.MAYBE, Start.INSIDE, Start.ANSWER

CASES = [
    # format, start, text, thought, said
    (THINK, MAYBE, "<think>\nBecause.\n</think>\n\nHello\n", "Because.", "Hello\n"),
    (THINK, MAYBE, "\n<think>a</think>b", "a", "b"),
    (THINK, MAYBE, "<think>\n\n</think>\n\nHello", "", "Hello"),
    (THINK, MAYBE, " \nHello <think>no</think>", "", " \nHello <think>no</think>"),
    (THINK, MAYBE, "<thin air", "", "<thin air"),
    (THINK, MAYBE, "<thin", "", "<thin"),
    (THINK, MAYBE, "\n \n", "", "\n \n"),
    (THINK, MAYBE, "", "", ""),
    (THINK, INSIDE, "\nSo 1 </ 2.\n\nYes.\n</think>\n\nHello </think>", "So 1 </ 2.\n\nYes.", "Hello </think>"),
    (THINK, INSIDE, "cut off \n", "cut off \n", ""),
    (THINK, INSIDE, "cut off </thi", "cut off </thi", ""),
    (THINK, INSIDE, "<think>a</think>", "<think>a", ""),
    (THINK, BEHIND, "\nHello <think>x</think>\n", "", "\nHello <think>x</think>\n"),
    (ERNIE, INSIDE, "a\n</think>\n\n\n<response>\nHello\n</response>\n", "a", "Hello"),
    (ERNIE, INSIDE, "a</think>\n\nHello\n", "a", "Hello\n"),
    (ERNIE, INSIDE, "a\n</think>\n<response>\nHello\n</resp", "a", "Hello\n</resp"),
    (ERNIE, INSIDE, "a\n</think>\n<response>b</response>\n<tool_call>\n{}", "a", "b<tool_call>\n{}"),
    (ERNIE, BEHIND, "<response>\nHello\n</response>", "", "Hello"),
    (FORMATS["kimi"], MAYBE, "◁think▷a◁/think▷b", "a", "b"),
    (FORMATS["mistral"], MAYBE, "[THINK]a[/THINK]b", "a", "b"),
]


def whole(splitter: ThoughtSplitter, pieces: list[str]) -> tuple[str, str]:
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts)


@pytest.mark.parametrize(("form", "start", "text", "thought", "said"), CASES)
def test_the_parts_of_a_text_however_it_is_cut(
    form: ReasoningFormat, start: Start, text: str, thought: str, said: str
) -> None:
    assert whole(ThoughtSplitter(form, start), [text]) == (thought, said)
    assert whole(ThoughtSplitter(form, start), list(text)) == (thought, said)
    for cut in range(len(text) + 1):
        assert whole(ThoughtSplitter(form, start), [text[:cut], text[cut:]]) == (thought, said), cut


def test_what_is_told_depends_on_the_characters_so_far_only() -> None:
    rng = random.Random(7)
    words = ["<think>", "</think>", "<response>", "</response>", "\n", " ", "<", "/", "think", ">", "a", "</th", "é"]
    for _ in range(2000):
        form, start = rng.choice([THINK, ERNIE]), rng.choice(list(Start))
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        by_char, by_piece = ThoughtSplitter(form, start), ThoughtSplitter(form, start)
        for piece in pieces:
            told = [by_char.push(char) for char in piece]
            expected = "".join(t for t, _ in told), "".join(s for _, s in told)
            assert by_piece.push(piece) == expected, (form.name, start, pieces)
            assert (by_piece.end, by_piece.is_inside) == (by_char.end, by_char.is_inside)
        assert by_piece.finish() == by_char.finish(), (form.name, start, pieces)


def test_long_runs_of_blanks_take_linear_time() -> None:
    num_pushes = 200_000
    for start in (MAYBE, INSIDE):
        splitter = ThoughtSplitter(THINK, start)
        for _ in range(num_pushes):  # quadratic, they would copy 60 GB
            splitter.push("   ")
        thought, said = splitter.finish()
        assert len(thought + said) in (0, 3 * num_pushes)


@pytest.mark.parametrize(
    ("start", "tokens", "counts"),
    [
        (MAYBE, ["<think>", "\n", "a", "</think>", "\n\n", "b", ""], [1, 2, 3, 4, 4, 4, 4]),
        (MAYBE, ["<", "think", ">", "a", "</", "think", ">b", "c"], [0, 0, 3, 4, 5, 6, 7, 7]),
        (MAYBE, ["\n", "a", "<think>"], [0, 0, 0]),
        (INSIDE, ["a", "", "b"], [1, 2, 3]),
        (BEHIND, ["a", "</think>"], [0, 0]),
    ],
)
def test_tokens_of_the_thinking_are_counted_exactly(start: Start, tokens: list[str], counts: list[int]) -> None:
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    counter, at_once = (ThoughtCounter(ReasoningOptions(THINK, start)) for _ in range(2))
    seen = []
    for token, offset in zip(tokens, offsets, strict=True):
        counter.add(token, [offset])
        seen.append(counter.count)
    assert seen == counts
    at_once.add("".join(tokens), offsets)
    assert at_once.count == counts[-1], "in one step"


def test_tokens_whose_text_is_still_held_back_are_counted_when_it_comes() -> None:
    counter = ThoughtCounter(ReasoningOptions(THINK, INSIDE))
    counter.add("a", [0, 1, 9, 12])  # a, </think>, and two that might begin a stop string
    assert counter.count == 4
    counter.add("</think>xyz", [15])
    assert counter.count == 2


@pytest.mark.parametrize(
    ("display", "pushed", "finished"),
    [
        (Display.STREAMED, [("a", ""), ("b", ""), ("", "c")], ("", "")),
        (Display.AT_ONCE, [("", ""), ("", ""), ("ab", "c")], ("", "")),
        (Display.HIDDEN, [("", ""), ("", ""), ("", "c")], ("", "")),
    ],
)
def test_thinking_is_shown_piece_by_piece_or_at_once_or_not_at_all(
    display: Display, pushed: list[tuple[str, str]], finished: tuple[str, str]
) -> None:
    splitter = ThoughtSplitter(THINK, INSIDE, display)
    assert [splitter.push(piece) for piece in ("a", "b", "</think>c")] == pushed
    assert splitter.finish() == finished
    cut_off = ThoughtSplitter(THINK, INSIDE, display)
    shown = [cut_off.push("ab"), cut_off.finish()]
    assert "".join(thought for thought, _ in shown) == ("" if display is Display.HIDDEN else "ab")


@pytest.mark.parametrize(
    ("form", "prompt_end", "start"),
    [
        (THINK, "<|im_start|>assistant\n", MAYBE),
        (THINK, "<|im_start|>assistant\n<think>\n", INSIDE),
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", BEHIND),
        (THINK, "<|Assistant|></think>", BEHIND),
        (FORMATS["glm45"], "<|assistant|>\n<think></think>", BEHIND),
        (FORMATS["deepseek_r1"], "<|Assistant|>", INSIDE),
        (FORMATS["deepseek_r1"], "<|Assistant|><think></think>", BEHIND),
        (THINK, "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", MAYBE),
    ],
)
def test_the_prompts_end_says_where_an_answer_begins(form: ReasoningFormat, prompt_end: str, start: Start) -> None:
    assert form.start(prompt_end) is start


@pytest.mark.parametrize(
    ("name", "template", "found"),
    [
        ("auto", "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "qwen3"),
        ("auto", "{{ content.split('</think>')[-1] }}", "qwen3"),
        ("auto", "<think>{{ r }}</think><response>{{ c }}</response>", "ernie_x1"),
        ("auto", "<seed:think>{{ r }}</seed:think>", "seed_oss"),
        ("auto", "[THINK]{{ r }}[/THINK]", "mistral"),
        ("auto", "<|start|>assistant<|channel|>final<|message|>{{ c }}<|end|>", "harmony"),
        ("auto", "{{ messages }}", None),
        ("auto", None, None),
        ("none", "<think></think>", None),
        ("ernie-x1", None, "ernie_x1"),
    ],
)
def test_a_format_is_found_by_its_name_or_in_the_template(name: str, template: str | None, found: str | None) -> None:
    form = find_format(name, template)
    assert (None if form is None else form.name) == found


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reasoning_parser: expected one of auto, none, .* got 'qwen'"):
        find_format("qwen", None)
    assert all(find_format(name, None) is not None for name in NAMES[2:])
