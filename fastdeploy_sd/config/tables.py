"""The tables of options in the documentation, in Markdown; scripts/config_docs.py writes them into the pages."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_sd.config.aliases import OTHER_MEANING, SAME_MEANING
from fastdeploy_sd.config.catalogue import MODELS_OPTION, MODELS_TEXT, OPTIONS
from fastdeploy_sd.config.eplb import EPLB_OPTION
from fastdeploy_sd.config.no_effect import NO_EFFECT
from fastdeploy_sd.config.option import Option
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS, SPECULATIVE_OPTION
from fastdeploy_sd.config.speculative_scopes import scope_of
from fastdeploy_sd.config.unsupported import (
    INSTEAD,
    UNSUPPORTED,
    UNSUPPORTED_EPLB,
    UNSUPPORTED_QUANTIZATION,
    UNSUPPORTED_SPECULATIVE,
)
from fastdeploy_sd.types.draft_methods import DEFAULT_METHOD

# Longest name of a flag with one dash, as in -ngl.
_SHORT = 3


def options_markdown() -> str:
    """Return the options as a Markdown table, for docs/configuration.md."""
    last = (
        f"| `{SPECULATIVE_OPTION}` | a map, JSON on the command line, or the name of a method | `{DEFAULT_METHOD}` |"
        " How drafts are made and verified; its keys are below. |\n"
    )
    models = f"| `{MODELS_OPTION}` | a map, or a text NAME=MODEL | none | {MODELS_TEXT} |\n"
    return table_of(OPTIONS) + last + models


def table_of(options: Iterable[Option]) -> str:
    """Return options as a Markdown table."""
    rows = ["| Option | Expected | Default | Meaning |", "|---|---|---|---|"]
    rows += [f"| `{o.name}` | {o.expected} | {_default_text(o)} | {_meaning(o)} |" for o in options]
    return "\n".join(rows) + "\n"


def speculative_markdown() -> str:
    """Return the keys of `speculative_config` as a Markdown table, for docs/configuration.md."""
    rows = ["| Key | With | Expected | Default | Meaning |", "|---|---|---|---|---|"]
    rows += [
        f"| `{o.name}` | {scope_of(o.name).where} | {o.expected} | {_default_text(o)} | {_meaning(o)} |"
        for o in SPECULATIVE_KEYS.values()
    ]
    return "\n".join(rows) + "\n"


def unsupported_markdown() -> str:
    """Return the options that are known but not supported yet as a table, for docs/unsupported.md."""
    maps = {
        "quantization": UNSUPPORTED_QUANTIZATION,
        EPLB_OPTION: UNSUPPORTED_EPLB,
        SPECULATIVE_OPTION: UNSUPPORTED_SPECULATIVE,
    }
    keys = {f"{name}.{key}": accepted for name, keys in maps.items() for key, accepted in keys.items()}
    rows = ["| Option | Accepted value | |", "|---|---|---|"]
    rows += [
        f"| `{name}` | {' or '.join(map(_accepted, accepted))} | {INSTEAD.get(name.rpartition('.')[2], '')} |"
        for name, accepted in {**UNSUPPORTED, **keys}.items()
    ]
    return "\n".join(rows) + "\n"


def _accepted(value: object) -> str:
    return '`""`' if value == "" else f"`{value}`".lower()


def no_effect_markdown() -> str:
    """Return the options that are accepted and do nothing as a table, for docs/unsupported.md."""
    by_reason: dict[str, list[str]] = {}
    for opt in NO_EFFECT.values():
        by_reason.setdefault(opt.spec.help, []).append(f"`{opt.name}`")
    rows = ["| Options | Why |", "|---|---|"]
    return "\n".join(rows + [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]) + "\n"


def migration_markdown(program: str) -> str:
    """Return the options of another program and ours as a table, for docs/migration.md."""
    rows = [f"| {program} | Here |", "|---|---|"]
    for table, verb in ((SAME_MEANING, "`{}`, and the name is understood"), (OTHER_MEANING, "{}")):
        by_meaning: dict[str, list[str]] = {}
        for name, foreign in table.items():
            if foreign.program == program:
                by_meaning.setdefault(foreign.here, []).append(f"`{_flag(name)}`")
        rows += [f"| {', '.join(names)} | {verb.format(here)} |" for here, names in by_meaning.items()]
    return "\n".join(rows) + "\n"


def _flag(name: str) -> str:
    return ("-" if len(name) <= _SHORT else "--") + name.replace("_", "-")


def _default_text(opt: Option) -> str:
    if opt.spec.default_text:
        return opt.spec.default_text
    if opt.is_required:
        return "required"
    return "none" if opt.default in (None, ()) else f"`{str(opt.default).lower()}`"


def _meaning(opt: Option) -> str:
    aliases = ", ".join(f"`{alias}`" for alias in opt.spec.aliases)
    return opt.spec.help + (f" Also {aliases}." if aliases else "")
