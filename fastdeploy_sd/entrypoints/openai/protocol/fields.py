"""Kinds of request fields: checked by the sampling rules, taken only with the value that asks for nothing, or ignored.

Nothing a client sends is dropped in silence: a field is honoured, refused with a reason, or listed as one that cannot
change the answer. Each kind brings its own JSON schema, so that /openapi.json says what the validator does.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault
from fastdeploy_sd.errors import MAX_SHOWN_CHARS, BadRequest, suggest
from fastdeploy_sd.rules.sampling import NumberRule
from fastdeploy_sd.sampling_params import verified

# Bookkeeping of OpenAI's platform (billing, storage, abuse control, cache routing) with no meaning for one server.
Ignored = Any
# More wrong names than this in one object are not reported: they would not be read, and a body may hold a million.
MAX_NAMES = 5
TOKEN_IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
MAX_MAP_ENTRIES = 64
EMPTY = '""'

# A map whose keys are not ours; more are not needed, and each costs time.
SmallMap = Annotated[dict[str, Any], Field(max_length=MAX_MAP_ENTRIES)]


class Body(BaseModel):
    """A JSON object with exactly the declared fields; a string is never taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _verify_names(cls, value: Any) -> Any:
        """Stop at the first few unknown names, where pydantic would describe every one."""
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid":
            for name in unknown_names(cls, value):
                raise fault("below", unknown_field(name, cls.model_fields))
        return value

    def contradictions(self) -> list[Fault]:
        """Return what is wrong between fields that are right by themselves."""
        return []


def unknown_names(body_type: type[Body], value: Mapping[str, Any]) -> list[str]:
    """Return the first few names of an object that its body does not have."""
    return list(islice((name for name in value if name not in body_type.model_fields), MAX_NAMES))


def unknown_field(name: str, known: Iterable[str]) -> str:
    """Return "<name>: unknown field", with the nearest known name; an empty name is shown as ""."""
    name = name[:MAX_SHOWN_CHARS]
    return f"{name or EMPTY}: unknown field{suggest(name, known)}"


def fault(kind: str, text: str) -> PydanticCustomError:
    """Return a validation error of one of the kinds that faults.py words."""
    return PydanticCustomError(kind, "{text}", {"text": text})


def expected(what: str) -> PydanticCustomError:
    """Return the validation error "expected <what>, got <the value>"."""
    return fault("expected", what)


class FieldKind:
    """Annotates a field with a check and a schema; null passes as "not given", unless a kind says that it does not."""

    schema: Mapping[str, Any]
    takes_null = True

    def convert(self, value: Any) -> Any:
        """Return the value as the body holds it. Raises PydanticCustomError: it is refused."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's form of the check."""
        return core_schema.no_info_plain_validator_function(
            lambda value: None if value is None and self.takes_null else self.convert(value)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema."""
        return {"anyOf": [dict(self.schema), {"type": "null"}]} if self.takes_null else dict(self.schema)


class Sampling(FieldKind):
    """A field that SamplingParams checks, alone; rules between two of them are checked when all are known.

    `unset`: another way to say null, as llama.cpp and LM Studio write -1. rule: what else must hold here.
    """

    def __init__(
        self, name: str, schema: Mapping[str, Any], unset: int | None = None, rule: NumberRule | None = None
    ) -> None:
        self._name = name
        self._unset, self._rule = unset, rule
        self.schema = schema if unset is None else {"anyOf": [dict(schema), {"const": unset}]}

    def convert(self, value: Any) -> Any:
        if self._unset is not None and _is_same(value, self._unset):
            return None
        try:
            if self._rule is not None and value is not None:
                self._rule.verify(self._name, value)
            verified(self._name, value)
        except BadRequest as error:
            text = error.message.removeprefix(self._name)
            raise fault("refused", text.removeprefix(": ")) from None
        return value


class Only(FieldKind):
    """A field that is taken only with the values that ask for nothing; the body then holds None.

    `instead`: what a client should know who asked for more.
    """

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        self._neutral = neutral
        self._reason = instead or "only " + " or ".join(_json_word(value) for value in neutral) + " is"
        self.schema = {"enum": list(neutral)}

    def convert(self, value: Any) -> None:
        if not any(_is_same(value, neutral) for neutral in self._neutral):
            raise fault("not_supported", self._reason)


class Integer(FieldKind):
    """An integer between two limits, high None = of any size."""

    def __init__(self, low: int, high: int | None = None) -> None:
        self._low, self._high = low, high
        self.schema = {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})

    def convert(self, value: Any) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < self._low or (self._high is not None and value > self._high):
            limits = f">= {self._low}" if self._high is None else f"in {self._low}..{self._high}"
            raise expected(f"an integer {limits}")
        return int(value)


class Matching(FieldKind):
    """Text of a form, given by an anchored regular expression and the words that follow "expected"."""

    def __init__(self, pattern: str, description: str) -> None:
        self._pattern = re.compile(pattern)
        self._description = description
        self.schema = {"type": "string", "pattern": pattern}

    def convert(self, value: Any) -> str:
        if not isinstance(value, str) or not self._pattern.fullmatch(value):
            raise expected(self._description)
        return value


class TokenIds(FieldKind):
    """Token ids; whether the vocabulary has them is checked where it is known."""

    schema = TOKEN_IDS_SCHEMA

    def __init__(self, takes_null: bool = True) -> None:
        self.takes_null = takes_null

    def convert(self, value: Any) -> list[int]:
        if not is_token_ids(value):
            raise expected("token ids (a list of integers)")
        return list(value)


# Of what this server has not: only values that ask for nothing are taken.
NotSupported = Annotated[None, Only(False, "", [], {}, instead="this server has no such feature")]


def is_token_ids(value: object) -> bool:
    """Return whether this is a list of integers; true and false are none."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _is_same(value: object, other: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _json_word(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


logger = logging.getLogger(__name__)

# A client that makes up names must not fill the log.
_MAX_NAMES = 64
_lock = threading.Lock()
_told: set[str] = set()


def tell_ignored(where: str, name: str) -> None:
    """Log that `name`, met in `where`, has no effect; the first time only, and of the first few dozen names."""
    text = f"{where}: {name[:MAX_SHOWN_CHARS]!r}"
    if text in _told or len(_told) >= _MAX_NAMES:
        return
    with _lock:
        if text in _told or len(_told) >= _MAX_NAMES:
            return
        _told.add(text)
    logger.warning("%s is left aside: this server has no use for it (said once)", text)
