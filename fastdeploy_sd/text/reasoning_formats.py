"""Reasoning formats by name: how models mark their reasoning, and which format a chat template uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fastdeploy_sd.errors import ConfigError, suggest

AUTO, NONE = "auto", "none"
# What models set around their marks; it belongs to no part of an answer.
SPACES = " \t\r\n"


class Start(StrEnum):
    """Where an answer begins; MAYBE: the model may open the thinking itself, as the first thing it writes."""

    MAYBE = "maybe"
    INSIDE = "inside"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of one family of models; those around the answer may be missing in a text.

    `answer_alone`: marks an answer before which nothing was thought. `thinks_unasked`: an answer begins inside the
    thinking also where the prompt's end does not say so. `has_channels`: an answer is messages with headers, of which
    any number may be thoughts; see ChannelSplitter. `others` are further marks.
    """

    name: str
    opening: str
    closing: str
    answer_opening: str = ""
    answer_closing: str = ""
    answer_alone: str = ""
    thinks_unasked: bool = False
    has_channels: bool = False
    others: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which have to be in the text even where the vocabulary hides them."""
        marks = (self.opening, self.closing, self.answer_opening, self.answer_closing, self.answer_alone, *self.others)
        return tuple(mark for mark in marks if mark)

    def start(self, prompt_end: str) -> Start:
        """Return where the answer to a prompt begins, by its last characters, control tokens visible.

        Templates write the opening mark for the model (`<think>`), or thinking that is over (`<think></think>`).
        """
        end = prompt_end.rstrip(SPACES)
        if self.has_channels:
            marks = {self.opening: Start.INSIDE, self.answer_alone: Start.ANSWER}
            return next((start for mark, start in marks.items() if end.endswith(mark)), Start.MAYBE)
        if end.endswith(self.closing):
            return Start.ANSWER
        if end.endswith(self.opening) or self.thinks_unasked:
            return Start.INSIDE
        return Start.MAYBE


class Display(StrEnum):
    """How what the model thinks reaches the client; UNSPLIT is as a part of the content, marks and all."""

    STREAMED = "streamed"
    AT_ONCE = "at_once"
    HIDDEN = "hidden"
    UNSPLIT = "unsplit"


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How what a model thinks is told apart in the answers to one prompt."""

    format: ReasoningFormat
    start: Start
    display: Display = Display.STREAMED


_THINK = ReasoningFormat("qwen3", "<think>", "</think>")
_FORMATS = (
    # In the order in which a template is tried: the more a format asks for, the earlier.
    replace(_THINK, name="ernie_x1", answer_opening="<response>", answer_closing="</response>"),
    _THINK,
    # Source: openai/harmony, docs/format.md.
    ReasoningFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        answer_alone="<|channel|>final<|message|>",
        has_channels=True,
        others=("<|start|>", "<|constrain|>", "<|call|>", "<|return|>"),
    ),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
)
_BY_NAME = {form.name: form for form in _FORMATS}
# Other servers' names of the same marks.
_LIKE_QWEN3 = ("deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "step3", "ernie_45_vl", "ernie_45_vl_thinking")
_SAME = dict.fromkeys(_LIKE_QWEN3, "qwen3") | {"ernie45": "ernie_x1", "openai_gptoss": "harmony", "gpt_oss": "harmony"}
FORMATS: Mapping[str, ReasoningFormat] = (
    _BY_NAME
    | {name: replace(_BY_NAME[same], name=name) for name, same in _SAME.items()}
    | {"deepseek_r1": replace(_THINK, name="deepseek_r1", thinks_unasked=True)}
)
NAMES = (AUTO, NONE, *FORMATS)
# At the end of a prompt: room for a mark in the smallest pieces and the blanks that templates write after it.
_NUM_END_TOKENS = 64


def find_format(name: str | None, template: str | None) -> ReasoningFormat | None:
    """Return the format that `--reasoning-parser` names, None = answers are not split; raises ConfigError."""
    name = (name or NONE).replace("-", "_").lower()
    if name == NONE:
        return None
    if name == AUTO:
        return next((form for form in _FORMATS if template and _has_marks(form, template)), None)
    if name not in FORMATS:
        raise ConfigError(
            f"reasoning_parser: expected one of {', '.join(NAMES)}, got {name!r}{suggest(name, NAMES)}",
            param="reasoning_parser",
        )
    return FORMATS[name]


def _has_marks(form: ReasoningFormat, template: str) -> bool:
    """A template that only cuts old thinking out of a conversation names the closing mark alone."""
    return form.closing in template and (form.answer_alone or form.answer_opening) in template


def start_of(form: ReasoningFormat, prompt: Sequence[int], decode: Callable[[list[int]], str]) -> Start:
    """Return where the answer to a prompt of token ids begins; `decode` shows control tokens."""
    return form.start(decode(list(prompt[-_NUM_END_TOKENS:])))
