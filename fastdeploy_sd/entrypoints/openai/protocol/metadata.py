"""`metadata`, which is two things: OpenAI's tags of a request, and FastDeploy's second place for its options.

OpenAI's values are always text. FastDeploy's server merges the keys into the request, below those of the request
itself. So a text is a tag and never acts; any other value is an option and must be one this route has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_sd.entrypoints.openai.protocol.fields import MAX_MAP_ENTRIES, MAX_NAMES
from fastdeploy_sd.entrypoints.openai.protocol.ignored import tell_ignored

METADATA = "metadata"


def split_metadata(data: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options in a body's metadata that its own fields leave open, and the first few unknown ones' names.

    Args:
        data: the body, an object.
        known: names of the route's fields.
    """
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
