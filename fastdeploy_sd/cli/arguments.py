"""The parser of a subcommand's own arguments: its errors look like all others. Knows no arguments."""

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
