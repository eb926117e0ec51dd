"""A tool call format: how calls are read, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastdeploy_sd.text.tool_calls.scanner import Reader, Scanner, Sink


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that a request offers, and which of its parameters are always texts, or texts or null."""

    name: str
    text_parameters: tuple[str, ...] = ()
    nullable_texts: tuple[str, ...] = ()


Functions = Mapping[str, CallableFunction]
Read = Callable[[Sink, str, Functions], Reader]
# What calls without marks of a format begin with: a JSON object, a list of them, a Markdown fence around them.
BARE_OPENINGS = ("{", "[", "```")


@dataclass(frozen=True, slots=True)
class ParameterText:
    """How a format without a JSON object writes a parameter: text around its name and its value."""

    before_name: str
    before_value: str
    after: str


@dataclass(frozen=True, slots=True)
class CallText:
    """The text around each name and arguments, and around all calls; `parameters` None = the arguments are JSON."""

    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after: str = "}"
    between: str = "\n"
    before_all: str = ""
    after_all: str = ""
    parameters: ParameterText | None = None


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A tool call format: `openings` begin a call or a list of them; `markers` are hidden tokens in some vocabularies.

    A chat template of these models has all the texts of one group of `signs`. With `only_first`, openings begin a call
    only before all content, or right after another call, and so do `first_openings` in any case.

    In a guided answer an opening that begins no call is followed by one of `other_messages`, and `excluded_text` does
    not occur outside of calls.
    """

    models: str
    openings: tuple[str, ...]
    read: Read
    text: CallText
    only_first: bool = False
    first_openings: tuple[str, ...] = ()
    other_messages: tuple[str, ...] = ()
    excluded_text: str = ""
    markers: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()

    @property
    def has_separate_calls(self) -> bool:
        """Whether each call has marks of its own, and nothing is around all of them."""
        return not (self.only_first or self.text.before_all)

    def parser(
        self, functions: Sequence[CallableFunction], read_bare: Read | None = None, *, ends_after_calls: bool = False
    ) -> Scanner:
        """Return what finds calls of these functions in one answer, and bare ones at its beginning with `read_bare`."""
        named = {function.name: function for function in functions}
        readers = dict.fromkeys((*self.openings, *self.first_openings), self.read)
        only_first = {*self.first_openings, *(self.openings if self.only_first else ())}
        if read_bare is not None:
            longer = [own for own in self.openings if own not in BARE_OPENINGS]
            bare = [opening for opening in BARE_OPENINGS if not any(own.startswith(opening) for own in longer)]
            readers |= dict.fromkeys(bare, read_bare)
            only_first |= {*bare}
        return Scanner(
            tuple(readers),
            lambda sink, opening: readers[opening](sink, opening, named),
            named,
            only_first,
            ends_after_calls=ends_after_calls,
        )
