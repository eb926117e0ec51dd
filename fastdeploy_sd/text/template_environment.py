"""The sandbox that chat templates run in, and what keeps control tokens in messages from acting there.

A template that looks for a control token (`'</think>' in content`) finds its placeholder.
"""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.rules.requests import prompt_too_long
from fastdeploy_sd.text.call_arguments import Arguments, to_json

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Shield:
    """The placeholders of one rendering, in which messages may spell `limit` control tokens, None = any number."""

    def __init__(self, control: re.Pattern[str], beginnings: Collection[str], limit: int | None) -> None:
        self._control = control
        self._beginnings = beginnings
        self._limit = limit
        self._num_found = 0
        self._longest = max(map(len, beginnings), default=0)
        # Digits survive `upper`, `lower` and `tojson`. The borders, two random private-use characters, show a cut.
        self._nonce = str(secrets.randbits(128))
        self._open, self._close = map(chr, secrets.SystemRandom().sample(_PRIVATE_USE, 2))
        self._placeholders: dict[str, str] = {}  # of each text, in the order in which they were first found
        self.end_mark = self.mark("end")
        self._placeholder = re.compile(f"{self._open}{self._nonce}:([0-9]+){self._close}")

    def mark(self, name: str) -> str:
        """Return a random text that stands for none; it must not be left in what a template wrote."""
        return f"{self._open}{self._nonce}:{name}{self._close}"

    def cover(self, value: Any) -> Any:
        """Return a JSON value with each control token in its texts replaced by a placeholder; raises BadRequest.

        The beginning of a token at the end of a text is replaced too, as the next text could complete it.
        """
        if isinstance(value, str):
            return type(value)(self._cover_end(self._control.sub(self._cover_match, value)))
        if isinstance(value, Mapping):
            covered = {self.cover(key): self.cover(item) for key, item in value.items()}
            return Arguments(covered, self.cover(value.text)) if isinstance(value, Arguments) else covered
        if isinstance(value, Sequence):
            return [self.cover(item) for item in value]
        return value

    def uncover(self, text: str) -> str:
        """Put the originals back; raises BadRequest where the template cut a placeholder in two."""
        originals = [*self._placeholders]
        restored = self._placeholder.sub(lambda m: originals[int(m[1])], text)
        if originals and any(part in restored for part in (self._open, self._close, self._nonce)):
            raise BadRequest("messages: the chat template cuts a message inside a control token", param="messages")
        return restored

    def as_spelled(self, wanted: str, text: str) -> str:
        """Return what a template has to look for to find `wanted` in a text that may come from a message."""
        covered = self._control.sub(lambda m: self._placeholders.get(m[0], m[0]), wanted)
        return covered if covered in text else wanted

    def _cover_end(self, text: str) -> str:
        words = text.rstrip()  # a template may trim it
        for n in range(min(self._longest, len(words)), 0, -1):
            if words[-n:] in self._beginnings:
                return words[:-n] + self._placeholder_of(words[-n:]) + text[len(words) :]
        return text

    def _cover_match(self, match: re.Match[str]) -> str:
        self._num_found += 1
        if self._limit is not None and self._num_found > self._limit:
            raise prompt_too_long(self._limit + 1, "more than that of control tokens in messages", param="messages")
        return self._placeholder_of(match[0])

    def _placeholder_of(self, original: str) -> str:
        new = f"{self._open}{self._nonce}:{len(self._placeholders)}{self._close}"
        return self._placeholders.setdefault(original, new)


_ACTIVE: ContextVar[Shield | None] = ContextVar("shield", default=None)


@contextmanager
def rendering_with(shield: Shield) -> Iterator[None]:
    """Have `wanted_in` use this shield in the block."""
    token = _ACTIVE.set(shield)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def wanted_in(text: object, wanted: Any) -> Any:
    """Return what to look for in `text` to find `wanted`; anything but two texts is left as it is."""
    shield = _ACTIVE.get()
    if shield is None or not isinstance(text, str) or not isinstance(wanted, str):
        return wanted
    return shield.as_spelled(wanted, text)


# Methods of a text whose first argument is looked for in it.
_SEARCHES = frozenset(
    {"split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "count", "replace"}
    | {"startswith", "endswith", "removeprefix", "removesuffix"}
)


class RefusedError(Exception):
    """A template refuses the messages, in its own words."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates. Compiling computes nothing: `{{ 'a' * 10**10 }}` is computed by rendering, with limits."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            optimized=False,
            finalize=_finalize,
        )
        self.filters["tojson"] = _tojson
        self.filters["replace"] = _replace
        self.tests["in"] = _is_in
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template; raises jinja2.TemplateSyntaxError, and other errors where it nests too deeply."""
        tree: jinja2.nodes.Template = _Searches().visit(self.parse(source))
        return self.from_string(tree)

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, as jinja2 asks for it."""
        text = getattr(called, "__self__", None)
        if args and isinstance(text, str) and called.__name__ in _SEARCHES:
            args = wanted_in(text, args[0]), *args[1:]
        return super().call(context, called, *args, **kwargs)


def reads_tools(source: str) -> bool:
    """Return whether a valid template has a place for functions that the model may call."""
    return "tools" in jinja2.meta.find_undeclared_variables(Sandbox().parse(source))


class _Searches(jinja2.visitor.NodeTransformer):
    """Makes the test `in` of the operators `in` and `not in`, which jinja2 leaves to Python."""

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Expr:  # noqa: N802 - a name of jinja2
        """Return the node that takes the place of a comparison."""
        self.generic_visit(node)
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            return node
        [operand] = node.ops
        test = jinja2.nodes.Test(node.expr, "in", [operand.expr], [], None, None, lineno=node.lineno)
        return test if operand.op == "in" else jinja2.nodes.Not(test, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    """Prevent constant folding: the compiler does not run in advance what takes the context."""
    return value


def _is_in(value: Any, container: Any) -> bool:
    return wanted_in(container, value) in container


@jinja2.pass_eval_context
def _replace(context: jinja2.nodes.EvalContext, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    return jinja2.filters.do_replace(context, text, wanted_in(text, old), new, count)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as it is, without HTML escaping."""
    return to_json(value, indent=indent, ensure_ascii=ensure_ascii, **options)
