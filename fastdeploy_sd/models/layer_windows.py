"""Reads which layers of a decoder have a sliding window, and of how many tokens."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_sd.models.checkpoint.fields import FieldReader

# Layer types in config.json.
FULL, SLIDING = "full_attention", "sliding_attention"
# Whether a layer of this number has a window.
IsWindowed = Callable[[int], bool]


def every_layer(layer: int) -> bool:
    return layer >= 0


def all_but_every(period: int) -> IsWindowed:
    """Full attention in layers period - 1, 2 * period - 1 and so on."""
    return lambda layer: (layer + 1) % period != 0


def read_windows(
    reader: FieldReader, num_layers: int, is_windowed: IsWindowed | None = None, default: int | None = None
) -> list[int | None]:
    """Return each layer's window; arguments and errors as read_windowed.

    Where `is_windowed` is given, `sliding_window` may be null, and `default` is for a file without it.
    """
    windowed = read_windowed(reader, num_layers, is_windowed)
    if not any(windowed):
        return [None] * num_layers
    is_optional = is_windowed is not None
    window = (reader.optional_integer if is_optional else reader.integer)("sliding_window", default)
    return [window if flag else None for flag in windowed]


def read_windowed(reader: FieldReader, num_layers: int, is_windowed: IsWindowed | None = None) -> list[bool]:
    """Return which layers have a window: by `layer_types`, else by `is_windowed`.

    Without that, with `use_sliding_window`, those from `max_window_layers` on. Some releases list draft layers too, so
    that there may be more types than layers. Raises CheckpointError: there are fewer, or another type.
    """
    types, num_full = reader.values.get("layer_types"), reader.integer("max_window_layers")
    if types is None:
        num_full = num_full if reader.boolean("use_sliding_window") else num_layers
        return [i >= num_full if is_windowed is None else is_windowed(i) for i in range(num_layers)]
    if not isinstance(types, list) or len(types) < num_layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise reader.error("layer_types", f"a list of {num_layers} '{FULL}' or '{SLIDING}'", types)
    return [kind == SLIDING for kind in types[:num_layers]]
