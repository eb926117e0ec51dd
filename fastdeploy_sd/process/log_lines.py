"""The format of log lines, wherever they come from: a server's processes, or an LLM in a program."""

from __future__ import annotations

import logging
import sys

_PACKAGE = "fastdeploy_sd"


def line_format(process: str) -> str:
    """Return the format of a line; it names the kind of process."""
    return f"%(asctime)s %(levelname)s {process}: %(message)s"


def show_lines(process: str) -> None:
    """Write our lines from INFO on to standard error, unless the program has set up logging of its own.

    Whether it has is seen at every line, so the program may set it up later too. May be called again.
    """
    logger = logging.getLogger(_PACKAGE)
    if any(isinstance(handler, _DefaultHandler) for handler in logger.handlers):
        return
    handler = _DefaultHandler()
    handler.setFormatter(logging.Formatter(line_format(process)))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class _DefaultHandler(logging.Handler):
    """Writes lines that no handler of the program gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr, flush=True)
