"""Parses and validates a body, or raises one error that lists all its faults. A pure function of the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from fastdeploy_sd.entrypoints.openai.body_shape import verify_names_once
from fastdeploy_sd.entrypoints.openai.protocol.faults import Fault, faults_of, refusal
from fastdeploy_sd.entrypoints.openai.protocol.fields import (
    MAX_MAP_ENTRIES,
    MAX_NAMES,
    Body,
    tell_ignored,
    unknown_field,
    unknown_names,
)
from fastdeploy_sd.errors import BadRequest, shown

_MAX_PARAM = 64  # characters of an unknown name
BodyType = TypeVar("BodyType", bound=Body)


def parse_body(body_type: type[BodyType], content: bytes) -> BodyType:
    """Return the validated body.

    Raises BadRequest: not JSON, or fields are there twice, unknown, wrong, not supported or contradict each other; the
    text names the first few of them.
    """
    data = _object(content)
    known = body_type.model_fields
    faults = [Fault(unknown_field(name, known), name[:_MAX_PARAM]) for name in unknown_names(body_type, data)]
    merged: dict[str, Any] = {}
    if METADATA in known:
        merged, unknown = split_metadata(data, known)
        faults += [Fault(f"{METADATA}.{unknown_field(name, known)}", METADATA) for name in unknown]
    fields = {name: value for name, value in data.items() if name in known} | merged
    try:
        body = body_type.model_validate(fields)
    except ValidationError as error:
        raise refusal([*faults, *faults_of(error, dict.fromkeys(merged, f"{METADATA}."))]) from None
    faults += body.contradictions()
    if faults:
        raise refusal(faults)
    return body


def _object(content: bytes) -> dict[str, Any]:
    try:
        data = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"body: expected JSON, got {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise BadRequest(f"body: expected an object, got {shown(data)}")
    verify_names_once(content, data)
    return data


METADATA = "metadata"


def split_metadata(data: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options in a body's metadata that its own fields leave open, and the first few unknown ones' names."""
    metadata = data.get(METADATA)
    options: dict[str, Any] = {}
    unknown: list[str] = []
    entries = metadata.items() if isinstance(metadata, dict) and len(metadata) <= MAX_MAP_ENTRIES else ()
    for name, value in entries:  # a larger map is refused for its size
        if isinstance(value, str):
            if name in known:
                tell_ignored("text in metadata (a tag)", name)
        elif value is not None and name in known and name != METADATA:
            if data.get(name) is None:
                options[name] = value
        elif value is not None and len(unknown) < MAX_NAMES:
            unknown.append(name)
    return options, unknown
