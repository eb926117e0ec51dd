"""The text of --help for the options of a server. argparse lays it out; it parses nothing here."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from fastdeploy_sd.config.catalogue import MODELS_TEXT, OPTIONS
from fastdeploy_sd.config.option import Option
from fastdeploy_sd.config.speculative import SPECULATIVE_KEYS, SPECULATIVE_OPTION
from fastdeploy_sd.config.speculative_scopes import scope_of
from fastdeploy_sd.types.draft_methods import DEFAULT_METHOD

_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}
_EPILOG = (
    "The model may also be the first word. Dashes and underscores are the same in flags, and every option is also a"
    " YAML key. Options of FastDeploy that do nothing here, or are not there yet: docs/unsupported.md."
)
_INDENT = "  "


def help_text(prog: str, description: str) -> str:
    """Return what --help prints."""
    parser = argparse.ArgumentParser(
        prog,
        usage="%(prog)s [MODEL] [OPTION...]",
        description=description,
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line overrides it.")
    parser.add_argument("--models", metavar="NAME=MODEL|JSON", help=MODELS_TEXT)
    groups = {s: parser.add_argument_group(s or "process") for s in dict.fromkeys(o.section for o in OPTIONS)}
    for opt in OPTIONS:
        add_flag(groups[opt.section], opt, opt.default)
    speculative = parser.add_argument_group("speculative")
    text = (
        "How drafts are made and verified: a method's name, as naive for plain decoding, or a map such as"
        ' {"method": "ngram", "num_speculative_tokens": 4}, whose keys are below.'
        f" (default: {DEFAULT_METHOD})"
    )
    speculative.add_argument("--speculative-config", dest=SPECULATIVE_OPTION, metavar="NAME|JSON", help=text)
    parser.add_argument_group("keys of --speculative-config", "\n".join(map(_key_text, SPECULATIVE_KEYS.values())))
    return parser.format_help()


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of a text that has several; argparse's own would make one paragraph of the keys."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        if len(lines) == 1:
            return super()._fill_text(text, width, indent)
        return "\n".join(
            textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent + 2 * _INDENT) for line in lines
        )


def add_flag(group: Any, opt: Option, default_value: object) -> None:
    """Add an option to a group of argparse, which shows it with this default."""
    names = [opt.flag, *("--" + alias.replace("_", "-") for alias in opt.spec.aliases)]
    shown = opt.spec.default_text.replace("`", "") or _shown(default_value)
    default = "required" if opt.is_required else f"default: {shown}"
    # Choices stand in the place of the value already; of a text nothing can be said.
    expected = f" Expected {opt.expected}." if opt.kind in (int, float) and not opt.choices else ""
    text = f"{opt.spec.help}{expected} ({default})".replace("%", "%%")
    if opt.kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, dest=opt.name, help=text)
    else:
        group.add_argument(*names, dest=opt.name, metavar=_metavar(opt), help=text)


def _metavar(opt: Option) -> str:
    if not opt.choices:
        return _METAVARS.get(opt.kind, "JSON")
    words = [*map(str, opt.choices), *["none"] * (opt.is_optional and "none" not in opt.choices)]
    return "{" + ",".join([*words, *["JSON"] * (opt.spec.read_map is not None)]) + "}"


def _key_text(opt: Option) -> str:
    default = opt.spec.default_text.replace("`", "") or _shown(opt.default)
    return f"{opt.name}: {opt.spec.help} Expected {opt.expected}; with {scope_of(opt.name).where}. (default: {default})"


def _shown(default: object) -> str:
    return "none" if default in (None, ()) else str(default).lower() if isinstance(default, bool) else str(default)
