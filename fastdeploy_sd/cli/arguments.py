"""Parses the arguments of subcommands: errors in one form, lists of names. Knows no single argument."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fastdeploy_sd.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse with flags spelled out in full, and ConfigError for what it cannot parse."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's words."""
        raise ConfigError(f"{message} ({self.prog} --help tells more)")


def read_names(text: str) -> list[str]:
    """Return the names between the commas, each once and in the order of its first place."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))
