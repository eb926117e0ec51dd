"""The table of all options, by name, and its rendering for docs/configuration.md."""

from __future__ import annotations

from fastdeploy_sd.config.option import Option, options_of
from fastdeploy_sd.config.sections import CacheConfig, Config, ModelConfig, SchedulerConfig, ServerConfig
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS, SPECULATIVE_OPTION, scope_of
from fastdeploy_sd.config.unsupported import (
    UNSUPPORTED,
    UNSUPPORTED_GRAPH,
    UNSUPPORTED_QUANTIZATION,
    UNSUPPORTED_SPECULATIVE,
)

# Attribute of Config -> its class, in the order in which people read about them.
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "server": ServerConfig,
}
OPTIONS: tuple[Option, ...] = (
    *(opt for section, cls in SECTIONS.items() for opt in options_of(cls, section)),
    *options_of(Config, ""),
)
BY_NAME: dict[str, Option] = {opt.name: opt for opt in OPTIONS}
KNOWN_NAMES: tuple[str, ...] = (*BY_NAME, SPECULATIVE_OPTION)
_ALIASES = {alias: opt.name for opt in OPTIONS for alias in opt.spec.aliases} | {"tp": "tensor_parallel_size"}


def canonical_name(written: str) -> str:
    """Return the option name that a key or flag stands for: underscores, aliases resolved."""
    name = written.replace("-", "_")
    return _ALIASES.get(name, name)


def options_markdown() -> str:
    """Return the options as a Markdown table, for docs/configuration.md."""
    rows = ["| Option | Expected | Default | Meaning |", "|---|---|---|---|"]
    rows += [f"| `{o.name}` | {o.expected} | {_default_text(o)} | {_meaning(o)} |" for o in OPTIONS]
    rows.append(
        f"| `{SPECULATIVE_OPTION}` | a map, or JSON on the command line | `{{method: naive}}` | How drafts are made and"
        " judged; its keys are below. |"
    )
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
    """Return the options that are known but not supported yet as a Markdown table."""
    rows = ["| Option | Accepted value |", "|---|---|"]
    maps = {
        "quantization": UNSUPPORTED_QUANTIZATION,
        "graph_optimization_config": UNSUPPORTED_GRAPH,
        SPECULATIVE_OPTION: UNSUPPORTED_SPECULATIVE,
    }
    keys = {f"{name}.{key}": accepted for name, keys in maps.items() for key, accepted in keys.items()}
    rows += [f"| `{n}` | {' or '.join(f'`{v}`'.lower() for v in a)} |" for n, a in {**UNSUPPORTED, **keys}.items()]
    return "\n".join(rows) + "\n"


def _default_text(opt: Option) -> str:
    if opt.spec.default_text:
        return opt.spec.default_text
    if opt.is_required:
        return "required"
    return "none" if opt.default in (None, ()) else f"`{str(opt.default).lower()}`"


def _meaning(opt: Option) -> str:
    aliases = ", ".join(f"`{alias}`" for alias in opt.spec.aliases)
    return opt.spec.help + (f" Also {aliases}." if aliases else "")
