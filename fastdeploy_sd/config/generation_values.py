"""What `override_generation_config` says: keys of generation_config.json, in place of the file's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.maps import has_meaning, read_map
from fastdeploy_sd.errors import ConfigError, shown

OVERRIDE_OPTION = "override_generation_config"


@dataclass(frozen=True, slots=True)
class GenerationValues:
    """Keys of generation_config.json; None = the file's value. Ranges are checked where the file's are."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def to_map(self) -> dict[str, Any]:
        """Return the map that says this."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


def read_generation_values(value: object) -> GenerationValues:
    """Return what a map or its JSON text says; a null says nothing.

    Raises ConfigError: no map or JSON object; a key that is unknown or repeated; a value that is no number.
    """
    if isinstance(value, GenerationValues):
        value = value.to_map()
    faults = Faults()
    values: dict[str, Any] = {}
    names = [field.name for field in fields(GenerationValues)]
    for key, item in read_map(OVERRIDE_OPTION, value).items():
        with faults.collecting():
            has_meaning(OVERRIDE_OPTION, key, item, names, {})
            if isinstance(item, bool) or not isinstance(item, int | float | None):
                text = f"{OVERRIDE_OPTION}.{key}: expected a number, got {shown(item)}"
                raise ConfigError(text, param=OVERRIDE_OPTION)
            values[key] = item
    faults.raise_all()
    return GenerationValues(**values)
