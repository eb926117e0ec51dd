"""Log files of a server's processes, where they are asked for: one file per process, bounded in size.

Knows the folder only, not which processes there are. Two processes never write one file, so several servers may share
a folder: of two with one name the second writes NAME-2.log.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import count
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fastdeploy_sd.config.environment import LOG_DIR_VARIABLE, LOG_FORMAT_VARIABLE
from fastdeploy_sd.errors import ConfigError, shown

MAX_FILE_BYTES = 32 << 20
NUM_OLD_FILES = 7
_CREATE = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o640


class LogFile(RotatingFileHandler):
    """Appends to a file of its own in a folder: NAME.log, its predecessors NAME.log.1 (the last) to NAME.log.7.

    The folder is created if need be. Nothing but a regular file is opened, and no link is followed. When a line cannot
    be written, standard error says so once; logging must not end a server whose disk is full.

    Args:
        folder: where.
        process: NAME.

    Raises ConfigError: the folder or the file cannot be written.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self._has_failed = False
        self._lock_fd = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name, self._lock_fd = _own_name(folder, process)
            super().__init__(folder / name, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
        except OSError as error:
            self._release()
            reason = error.strerror or str(error)
            text = f"{LOG_DIR_VARIABLE}: expected a folder for log files, got '{folder}': {reason}"
            raise ConfigError(text, param=LOG_DIR_VARIABLE) from None

    def close(self) -> None:
        """Close the file and let others have its name."""
        with contextlib.suppress(OSError):  # the last lines could not be written
            super().close()
        self._release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Say once that lines are lost."""
        if not self._has_failed:
            self._has_failed = True
            print(f"error: {LOG_DIR_VARIABLE}: cannot write {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)

    def _release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | _CREATE, _MODE)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, f"{self.baseFilename} is not a regular file")
        return os.fdopen(fd, "a", encoding=self.encoding)


def _own_name(folder: Path, process: str) -> tuple[str, int]:
    """Return the first name that no running process writes, and a descriptor: it is ours until that is closed."""
    for number in count(1):
        stem = process if number == 1 else f"{process}-{number}"
        fd = os.open(folder / f".{stem}.lock", os.O_RDWR | _CREATE, _MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        else:
            return f"{stem}.log", fd
    raise AssertionError("count() does not end")


_PACKAGE = "fastdeploy_sd"


class JsonLines(logging.Formatter):
    """Writes a line as a JSON object: time, level, process, message and what the record has in `fields`.

    Args:
        process: the kind of process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "process": self._process, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False)


def line_formatter(process: str) -> logging.Formatter:
    """Return the formatter of lines, which name the kind of process: text, or JSON where FD_LOG_FORMAT says so.

    Raises ConfigError: the variable has another value.
    """
    wanted = os.environ.get(LOG_FORMAT_VARIABLE, "text")
    if wanted not in ("text", "json"):
        text = f"{LOG_FORMAT_VARIABLE}: expected text or json, got {shown(wanted)}"
        raise ConfigError(text, param=LOG_FORMAT_VARIABLE)
    if wanted == "json":
        return JsonLines(process)
    return logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s")


def show_lines(process: str) -> None:
    """Write our lines from INFO on to standard error, unless the program has set up logging of its own.

    Whether it has is seen at every line, so the program may set it up later too. May be called again.
    """
    logger = logging.getLogger(_PACKAGE)
    if any(isinstance(handler, _DefaultHandler) for handler in logger.handlers):
        return
    handler = _DefaultHandler()
    handler.setFormatter(line_formatter(process))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


@contextlib.contextmanager
def worker_lines_from(level: int) -> Iterator[None]:
    """Write what the worker logs from this level on only."""
    logger = logging.getLogger(f"{_PACKAGE}.worker")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class _DefaultHandler(logging.Handler):
    """Writes lines that no handler of the program gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr, flush=True)
