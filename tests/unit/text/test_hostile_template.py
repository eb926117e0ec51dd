"""A template that a checkpoint brings: bounded when it is compiled, and in a process of its own when it is rendered."""

from __future__ import annotations

import re
import resource
from dataclasses import replace

import pytest

from fastdeploy_sd.errors import BadRequest, CheckpointError
from fastdeploy_sd.text import template_process
from fastdeploy_sd.text.added_tokens import Segment
from fastdeploy_sd.text.chat_template import MAX_CHARS, ChatTemplate, Message
from fastdeploy_sd.text.template_environment import Sandbox
from fastdeploy_sd.text.template_process import TemplateProcess

pytestmark = pytest.mark.slow

HELLO = [Message("user", "hello<pad>")]
# Each takes gigabytes or ages when it is computed.
HUGE = [
    "{{ 'a' * 3000000000 }}",
    "{% set a = 'a' * 3000000000 %}",
    "{% if 'a' * 3000000000 %}{% endif %}",
    "{{ 9 ** 10000000 ** 2 }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ 'a' | center(3000000000) }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{{ '{:3000000000}'.format(1) }}",
    "{{ 'a\nb' | indent(3000000000) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=['ab']) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
]
ENDLESS = "".join("{% for a in range(100000) %}" for _ in range(5)) + "{% endfor %}" * 5


@pytest.mark.parametrize("source", HUGE)
def test_nothing_is_computed_when_a_template_is_compiled(source: str) -> None:
    """With smaller numbers: a constant that takes too much to be computed would be left alone in any case."""
    source = re.sub("[23]000000000", "2000000", source).replace("10000000 ** 2", "5000")
    code = Sandbox().compile(source, raw=True)
    assert len(code) < 5000, "no constant was computed into the code"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% for a in b %}" * 3000 + "{% endfor %}" * 3000,
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "a + " * 20_000 + "a }}",
        "{{ " + "not " * 20_000 + "a }}",
        "{{ a" + "|upper" * 15_000 + " }}",
        "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
        "{{ " + "9" * 100_000 + " }}",
        "{% if a %}" + "{% elif b %}x" * 8000 + "{% endif %}",
        "x" * (MAX_CHARS + 1),
    ],
    ids=range(10),
)
def test_what_cannot_be_compiled_is_a_checkpoint_error(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"^chat template: .{1,300}$"):
        ChatTemplate(source, {}, ["<pad>"])


def test_a_process_renders_what_the_template_renders() -> None:
    source = (
        "<pad>{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | length }}{{ x }}<pad>{% endfor %}"
    )
    process, template = TemplateProcess(source, {}, ["<pad>"]), ChatTemplate(source, {}, ["<pad>"])
    for content in ["hello<pad>", "\U0001f680 <pa", "x" * 1_000_000]:
        messages = [Message("user", content), Message("assistant", "", tool_calls=[{"function": {"name": "f"}}])]
        segments = process.render(messages, {"x": "<pad>"})
        assert segments == template.render(messages, {"x": "<pad>"})
    assert segments[0] == Segment("<pad>", is_control=True)


def test_errors_of_a_process_are_those_of_the_template() -> None:
    process = TemplateProcess("{{ raise_exception('no') if not messages[0].name }}", {}, ["<pad>"])
    with pytest.raises(BadRequest, match="messages: no") as raised:
        process.render(HELLO, {})
    assert raised.value.param == "messages"
    with pytest.raises(BadRequest, match="prompt is too long: expected at most 0 tokens") as raised:
        process.render(HELLO, {}, 0)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(BadRequest, match="expected JSON values"):
        process.render(HELLO, {"x": object()})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="line 1"):
        TemplateProcess("{% if %}", {}, [])


@pytest.mark.parametrize("source", [*HUGE, ENDLESS])
def test_a_hostile_template_costs_one_request(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(template_process.LIMITS, memory_bytes=1 << 29, cpu_s=1)
    monkeypatch.setattr(template_process, "LIMITS", limits)
    process = TemplateProcess("{% if messages[0].content == 'go' %}" + source + "{% endif %}ok", {}, [])
    with pytest.raises(BadRequest, match=r"messages: .*(takes more|cannot render them: [A-Za-z])"):
        process.render([Message("user", "go")], {})
    assert process.render(HELLO, {}) == (Segment("ok", is_control=False),)
    [worker] = process._idle
    assert 0 < resource.prlimit(worker.pid, resource.RLIMIT_AS)[0] < 1 << 31


def test_a_long_conversation_renders() -> None:
    source = "{% for m in messages %}<pad>{{ m.role }}\n{{ m.content | trim }}<pad>\n{% endfor %}"
    messages = [Message("user", f"turn {i} " + "words " * 200) for i in range(5000)]
    assert len(TemplateProcess(source, {}, ["<pad>"]).render(messages, {})) == 20_000
