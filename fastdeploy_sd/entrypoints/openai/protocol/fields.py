"""Kinds of request fields: those that are ignored because they cannot matter, and those that are refused.

Nothing a client sends is dropped in silence: a field is honoured, refused with a reason, or listed here as one that
cannot change the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

# Bookkeeping of OpenAI's platform (billing, storage, abuse control, cache routing) with no meaning for one server.
Ignored = Any


class Body(BaseModel):
    """A JSON object with exactly the declared fields; a string is never taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def expected(what: str) -> PydanticCustomError:
    """Return the validation error "expected <what>, got <the value>"."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def _refuse_unless(is_neutral: Callable[[object], bool], alternative: str) -> Callable[[object], None]:
    def check(value: object) -> None:
        if not (value is None or is_neutral(value)):
            raise PydanticCustomError("not_supported", "{what}", {"what": alternative})

    return check


def _is_empty(value: object) -> bool:
    return value is False or value in ([], {})


NotSupported = Annotated[None, BeforeValidator(_refuse_unless(_is_empty, "this server has no such feature"))]
TextFormatOnly = Annotated[
    None, BeforeValidator(_refuse_unless(lambda v: v == {"type": "text"}, 'only {"type": "text"} is'))
]
TextModalityOnly = Annotated[None, BeforeValidator(_refuse_unless(lambda v: v == ["text"], 'only ["text"] is'))]
NoTool = Annotated[None, BeforeValidator(_refuse_unless(lambda v: v in ("none", "auto"), "there are no tools"))]
