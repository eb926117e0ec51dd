"""The sandbox that chat templates run in, with what templates of published checkpoints expect of it."""

from __future__ import annotations

import datetime
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

from fastdeploy_sd.text.call_arguments import to_json
from fastdeploy_sd.text.template_shield import wanted_in

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
        """Return the template.

        Raises:
            jinja2.TemplateSyntaxError: it is not valid; other errors where it nests too deeply or the like.
        """
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
