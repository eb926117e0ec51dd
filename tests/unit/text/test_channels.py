"""Answers in channels: the parts are the same however the text is cut, and guided ones come to those parts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from llguidance import LLMatcher

from fastdeploy_sd.text.answer_parser import AnswerParser
from fastdeploy_sd.text.answer_parts import AnswerPart, Content, PartsDelta, Reasoning, ToolCallDelta
from fastdeploy_sd.text.channels import MARKS, TURN_ENDS
from fastdeploy_sd.text.chat_template import Json, Message
from fastdeploy_sd.text.fast_tokenizer import FastTokenizer
from fastdeploy_sd.text.guidance.limits import limits_of
from fastdeploy_sd.text.guidance.reasoning import ThinkingGrammar
from fastdeploy_sd.text.guidance.vocabulary import make_vocabulary
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.text.reasoning import ThoughtCounter, make_splitter
from fastdeploy_sd.text.reasoning_formats import FORMATS, Display, ReasoningOptions, Start
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.text.tool_calls import formats
from fastdeploy_sd.text.tool_calls.call_format import CallableFunction
from fastdeploy_sd.text.tool_calls.grammars import tool_grammar
from fastdeploy_sd.text.tool_calls.tools import Tool, ToolMode, ToolUse
from tests.unit.text.vocabularies import CHANNEL_TEMPLATE, added_tokenizer, golden_tokenizer

HARMONY, CALLS = FORMATS["harmony"], formats.FORMATS["harmony"]
FUNCTIONS = (CallableFunction("get"), CallableFunction("now"))
ANALYSIS, FINAL, PREAMBLE = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
NEXT = "<|end|><|start|>assistant"
GET = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}'
NOW = " to=functions.now<|channel|>commentary json<|message|>{}"
MAYBE, INSIDE, ANSWER = Start.MAYBE, Start.INSIDE, Start.ANSWER

CASES: list[tuple[Start, str, str, str, list[tuple[str | None, str]]]] = [
    # start, text, thought, said, calls
    (MAYBE, f"{ANALYSIS}a b{NEXT}{FINAL}Hello\n<|return|>", "a b", "Hello\n", []),
    (MAYBE, f"{FINAL}Hello", "", "Hello", []),
    (MAYBE, f"{ANALYSIS}hm{NEXT}{GET}<|call|>", "hm", "", [("get", '{"a": 1}')]),
    (MAYBE, f"{ANALYSIS}hm{NEXT}{GET}", "hm", "", [("get", '{"a": 1}')]),
    (MAYBE, f"{ANALYSIS}hm{NEXT}{NOW}<|call|>", "hm", "", [("now", "{}")]),
    (MAYBE, NOW, "", "", [("now", "{}")]),
    (MAYBE, f"{PREAMBLE}I look.{NEXT}{GET}<|call|>", "", "I look.", [("get", '{"a": 1}')]),
    (MAYBE, f"{GET}<|call|><|start|>assistant{NOW}<|call|>", "", "", [("get", '{"a": 1}'), ("now", "{}")]),
    (MAYBE, f"{ANALYSIS}a{NEXT}{PREAMBLE}b{NEXT}{ANALYSIS}c{NEXT}{FINAL}d", "a\nc", "b\nd", []),
    (MAYBE, f"{ANALYSIS}no end<|start|>assistant{FINAL}Hello", "no end", "Hello", []),
    (MAYBE, "<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", "", []),
    (MAYBE, "<|channel|>analysis to=functions.now code<|message|>{}<|call|>", "", "", [("now", "{}")]),
    (MAYBE, f"{ANALYSIS}cut <|en", "cut <|en", "", []),
    (MAYBE, " plain", "", " plain", []),
    (MAYBE, " \n", "", " \n", []),
    (MAYBE, "", "", "", []),
    (MAYBE, "to", "", "to", []),
    (MAYBE, "to=me", "", "to=me", []),
    (MAYBE, "<|channel|>fin", "", "", []),
    (MAYBE, f"{ANALYSIS}a{NEXT}", "a", "", []),
    (MAYBE, f"<|channel|>!{FINAL}a", "", "<|channel|>!\na", []),
    (MAYBE, f"<|channel|>{'x' * 300}<|message|>a", "", f"<|channel|>{'x' * 300}\na", []),
    (MAYBE, "<|channel|>commentary to=functions.put<|message|>{}<|call|>", "", "<|channel|>commentary to=functions.put"
     "<|message|>{}<|call|>", []),
    (INSIDE, f"b{NEXT}{FINAL}Hello", "b", "Hello", []),
    (INSIDE, "cut off\n", "cut off\n", "", []),
    (ANSWER, f"ello <|channel|>x{NEXT}{NOW}", "", "ello <|channel|>x", [("now", "{}")]),
]  # fmt: skip


def parser(start: Start, display: Display = Display.STREAMED, functions: bool = True) -> AnswerParser:
    options = ReasoningOptions(HARMONY, start, display)
    return AnswerParser(make_splitter(options), CALLS.parser(FUNCTIONS) if functions else None)


def joined(parts: list[AnswerPart]) -> list[AnswerPart]:
    """Parts in order, neighbours of one kind joined."""
    found: list[AnswerPart] = []
    for part in parts:
        match part, found[-1] if found else None:
            case (Content(text), Content(before)):
                found[-1] = Content(before + text)
            case (Reasoning(text), Reasoning(before)):
                found[-1] = Reasoning(before + text)
            case (ToolCallDelta(index, None, more), ToolCallDelta(same, name, before)) if index == same:
                found[-1] = ToolCallDelta(index, name, before + more)
            case _:
                found.append(part)
    return found


def parsed(start: Start, pieces: list[str], display: Display = Display.STREAMED) -> list[AnswerPart]:
    answer = parser(start, display)
    return joined([part for piece in pieces for part in answer.push(piece)] + answer.finish())


@pytest.mark.parametrize(("start", "text", "thought", "said", "calls"), CASES)
def test_the_parts_of_an_answer_wherever_it_is_cut(
    start: Start, text: str, thought: str, said: str, calls: list[tuple[str | None, str]]
) -> None:
    whole = parsed(start, [text])
    parts = PartsDelta.of(whole)
    assert (parts.reasoning, parts.content) == (thought, said)
    assert [(call.name, call.arguments) for call in parts.tool_calls] == calls
    assert parsed(start, list(text)) == whole
    for place in range(len(text) + 1):
        assert parsed(start, [text[:place], text[place:]]) == whole, place


def test_any_text_comes_to_the_same_parts_at_every_prefix() -> None:
    rng = random.Random(7)
    words = [
        *MARKS,
        ANALYSIS,
        FINAL,
        PREAMBLE,
        NEXT,
        GET,
        NOW,
        "assistant",
        "analysis",
        "to=",
        " ",
        "\n",
        "<|",
        "{",
        "é",
    ]
    for _ in range(1500):
        start, display = rng.choice(list(Start)), rng.choice([Display.STREAMED, Display.HIDDEN, Display.AT_ONCE])
        text = "".join(rng.choices(words, k=rng.randrange(14)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        by_char, by_piece = parser(start, display), parser(start, display)
        for piece in pieces:
            told = [part for char in piece for part in by_char.push(char)]
            assert joined(by_piece.push(piece)) == joined(told), (start, pieces)
        assert joined(by_piece.finish()) == joined(by_char.finish()), (start, pieces)


def test_text_is_told_as_it_comes() -> None:
    answer = parser(MAYBE)
    shown = [answer.push(piece) for piece in ("<|channel|>analysis<|message|>", "a", " b", "<|end|>")]
    assert shown == [[], [Reasoning("a")], [Reasoning(" b")], []]
    shown = [answer.push(piece) for piece in ("<|start|>assistant", FINAL, "c", " <", "d")]
    assert shown == [[], [], [Content("c")], [], [Content(" <d")]]


def test_long_runs_of_blanks_take_linear_time() -> None:
    answer = parser(MAYBE, functions=False)
    for _ in range(100_000):
        answer.push("   ")
    assert PartsDelta.of(answer.finish()).content == " " * 300_000


def test_a_long_answer_of_marks_takes_linear_time() -> None:
    """Quadratic, it would copy 600 MB."""
    text = "<|channel|>!" * 10_000
    assert PartsDelta.of(parsed(MAYBE, [text])).content == text
    assert parsed(MAYBE, [f"{ANALYSIS}a{NEXT}" * 8_000]) == [Reasoning("\n".join("a" * 8_000))]


def test_thinking_is_shown_at_once_or_not_at_all() -> None:
    text = f"{ANALYSIS}ab{NEXT}{PREAMBLE}c{NEXT}{ANALYSIS}d"
    expected = [Reasoning("ab"), Content("c"), Reasoning("\nd")]
    assert parsed(MAYBE, list(text), Display.AT_ONCE) == expected
    answer = parser(MAYBE, Display.AT_ONCE)
    assert [part for char in text for part in answer.push(char)] == expected[:2]
    assert parsed(MAYBE, [text], Display.HIDDEN) == [Content("c")]


def test_tokens_of_every_thought_are_counted() -> None:
    tokens = ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant"]
    tokens += [*tokens[:5], "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "b"]
    counter = ThoughtCounter(ReasoningOptions(HARMONY, MAYBE))
    counts = []
    for i, token in enumerate(tokens):
        counter.add(token, [sum(map(len, tokens[:i]))])
        counts.append(counter.count)
    assert counts == [0, 0, 3, 4, 5, 5, 5, 5, 5, 5 + 5, 11, 12, 12, 12, 12, 12, 12, 12]


def tokenizer(directory: Path, is_special: bool) -> Tokenizer:
    return added_tokenizer(directory, MARKS, is_special=is_special)


@pytest.mark.parametrize("is_special", [True, False], ids=["hidden", "shown"])
def test_a_turn_ends_after_a_call_whatever_the_files_say(tmp_path: Path, is_special: bool) -> None:
    own = tokenizer(tmp_path, is_special)
    assert own.eos_token_ids[1:] == tuple(own.control_tokens[mark] for mark in TURN_ENDS)
    assert golden_tokenizer().eos_token_ids == own.eos_token_ids[:1]


class Guided:
    """A vocabulary with the marks, and matchers over it."""

    def __init__(self, own: Tokenizer) -> None:
        self.tokenizer, self.ends = own, own.eos_token_ids
        self.thinking = ThinkingGrammar(HARMONY, own, self.ends)
        self._vocabulary = make_vocabulary(own, own.num_ids, self.ends)
        hidden = {text: i for text, i in own.control_tokens.items() if i in own.hidden_ids}
        self.hidden_ids = {mark: hidden[mark] for mark in MARKS if mark in hidden}

    def takes(self, grammar: str, text: str) -> bool:
        """Whether an answer may be this text, marks as their tokens."""
        matcher = LLMatcher(self._vocabulary, grammar, limits=limits_of(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.fixture(scope="module", params=[True, False], ids=["hidden", "shown"])
def guided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guided:
    return Guided(tokenizer(tmp_path_factory.mktemp("t"), request.param))


def test_a_guided_text_has_a_header_of_its_own(guided: Guided) -> None:
    text = "start: /[a<]{2,4}/"
    for start, front in ((MAYBE, ""), (MAYBE, f"{ANALYSIS}so: </ é{NEXT}"), (INSIDE, f"so{NEXT}")):
        grammar = guided.thinking.wrap(guided.thinking.headed(text, start), start)
        assert guided.takes(grammar, f"{front}{FINAL}a<a")
        assert not guided.takes(grammar, f"{front}{FINAL}b")
        assert not guided.takes(grammar, f"{front}a<a")
    assert guided.thinking.headed(text, ANSWER) == text


def test_a_limit_of_the_thinking_holds(guided: Guided) -> None:
    text = "start: /a+/"
    for start, opening in ((MAYBE, ANALYSIS), (INSIDE, "")):
        for grammar in (text, ""):
            own = guided.thinking.wrap(guided.thinking.headed(grammar, start), start, max_tokens=3)
            assert guided.takes(own, f"{opening}!?#{NEXT}{FINAL}aa")
            assert not guided.takes(own, f"{opening}!?#%{NEXT}{FINAL}aa")
            assert not guided.takes(own, f"{opening}\n{NEXT}{ANALYSIS}\n{NEXT}{FINAL}aa")
    assert guided.takes(guided.thinking.wrap("", MAYBE, max_tokens=3), f"{FINAL}aa")


def test_wanted_and_possible_calls_are_guided(guided: Guided) -> None:
    tool = Tool("get", None, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True)
    uses = {mode: ToolUse((tool,), mode, frozenset({"get"})) for mode in (ToolMode.REQUIRED, ToolMode.AUTO)}
    made = {mode: tool_grammar(CALLS, use, guided.hidden_ids) for mode, use in uses.items()}
    wanted, possible = (guided.thinking.wrap(made[mode], MAYBE) for mode in (ToolMode.REQUIRED, ToolMode.AUTO))
    for front in ("", f"{ANALYSIS}hm{NEXT}"):
        assert guided.takes(wanted, front + GET)
        assert guided.takes(possible, front + GET)
        assert not guided.takes(wanted, front + GET.replace("1", '"1"'))
        assert not guided.takes(possible, front + GET.replace("1", '"1"'))
        assert not guided.takes(wanted, f"{front}{FINAL}Hello")
        assert guided.takes(possible, f"{front}{FINAL}Hello")
        assert guided.takes(possible, f"{front}{PREAMBLE}I look.{NEXT}{GET}")
        assert not guided.takes(possible, front + ' to=functions.get<|channel|>commentary json<|message|>{"a": "1"}')


def test_functions_without_a_description_are_offered_too(tmp_path: Path) -> None:
    tokenizer(tmp_path, is_special=True)
    (tmp_path / "chat_template.jinja").write_text(CHANNEL_TEMPLATE)
    own = FastTokenizer(tmp_path)
    tools = [Tool("now").definition, Tool("get", "Gets.").definition]
    text = own.decode(PromptEncoder(own).encode_chat([Message("user", "Hi")], {}, tools=tools), skip_hidden=False)
    assert text.startswith("<|start|>developer<|message|>//  type now;// Gets. type get;<|end|><|start|>user")


def test_earlier_calls_and_their_results_stand_in_the_prompt(tmp_path: Path) -> None:
    tokenizer(tmp_path, is_special=True)
    (tmp_path / "chat_template.jinja").write_text(CHANNEL_TEMPLATE)
    own = FastTokenizer(tmp_path)
    calls: list[Mapping[str, Json]] = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"a": i})}}
        for i, name in enumerate(("get", "now"))
    ]
    turns = [
        Message("user", "Hi"),
        Message("assistant", "I look.", tool_calls=calls, reasoning_content="hm"),
        Message("tool", "late", tool_call_id="c1"),
        Message("tool", "é", tool_call_id="c0"),
        Message("assistant", "Done.", reasoning_content="over"),
        Message("user", "<|end|>"),
    ]
    text = own.decode(PromptEncoder(own).encode_chat(turns, {"reasoning_effort": "low"}), skip_hidden=False)
    assert text == (
        "<|start|>user<|message|>Hilow<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>hm\nI look.<|end|>"
        '<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{"a": 0}<|call|>'
        '<|start|>functions.get to=assistant<|channel|>commentary<|message|>"é"<|end|>'
        "<|start|>assistant<|channel|>analysis<|message|><|end|>"
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"late"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
        "<|start|>user<|message|><|end|>low<|end|><|start|>assistant"
    )
