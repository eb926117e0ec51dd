"""All ops of a model: those that are also operators of Paddle."""

from __future__ import annotations

import importlib
import pkgutil

from fastdeploy_sd import ops
from fastdeploy_sd.device.program.declaration import Declaration
from fastdeploy_sd.device.program.op import Op


def declared_ops() -> tuple[Declaration, ...]:
    """Return the declarations of all Ops in the modules of `ops`, by name."""
    found: dict[str, Declaration] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        values = vars(importlib.import_module(f"{ops.__name__}.{module.name}")).values()
        found |= {value.declaration.name: value.declaration for value in values if isinstance(value, Op)}
    return tuple(found[name] for name in sorted(found))
