"""Reads files from other programs: regular files only, within a size. Writes files whole or not at all.

Opening a FIFO or a device waits, or never ends; here both are refused before a byte is read.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from fastdeploy_sd.errors import MAX_SHOWN_CHARS, CheckpointError

# Far above what any released checkpoint has: the largest index is 10 MB, the largest tokenizer 35 MB.
MAX_JSON_BYTES = 1 << 25
MAX_TEXT_BYTES = 1 << 26
_OTHERS = 0o077
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without ever waiting for it.

    Raises:
        FileNotFoundError: there is nothing of this name.
        OSError: it is no regular file, a link to nothing, or cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer; a socket cannot be opened at all.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(f"expected a regular file, got a link to nothing ({os.readlink(path)})") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((text for is_kind, text in _KINDS if is_kind(mode)), "another kind")
        raise OSError(f"expected a regular file, got {kind}")
    return open(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Return what a regular file holds; raises as open_regular, and OSError for more than `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise OSError(f"expected at most {max_bytes} bytes, got {size}")
        return file.read(-1 if max_bytes is None else max_bytes)


def read_private(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds that belongs to this user and that no other user can read.

    Raises:
        FileNotFoundError: there is nothing of this name.
        OSError: it is a link or no regular file, another user's or readable by others, or longer than `max_bytes`.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("something else than a regular file")
        if found.st_uid != os.getuid() or found.st_mode & _OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            raise OSError(f"one of user {found.st_uid} with mode {mode:o}, which not only this user can read")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"more than {max_bytes} bytes")
    return content


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a UTF-8 file's text; raises as read_bytes, and UnicodeDecodeError (a ValueError) for other bytes."""
    return read_bytes(path, max_bytes).decode("utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces the one at `path` when the block ends well; raises OSError.

    A crash leaves one of the two, whole, and perhaps an unfinished file: see `remove_unfinished`.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_unfinished_prefix(path), delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    # The new name itself is to survive a power failure.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes left of attempts to write a file; no other process may be writing it."""
    for unfinished in path.parent.glob(glob.escape(_unfinished_prefix(path)) + "*"):
        unfinished.unlink(missing_ok=True)


def _unfinished_prefix(path: Path) -> str:
    return f".{path.name}."


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object of a checkpoint's file; {} where there is none and `missing_ok`.

    Raises CheckpointError: it is no regular file, unreadable, too large, or not a JSON object.
    """
    try:
        text = read_text(path, MAX_JSON_BYTES)
        value = json.loads(text)
        if "\\ud" in text.lower():
            # Half of a pair alone is no text: nothing that takes text could take it.
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise CheckpointError(f"{path}: expected a JSON file, found none") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a readable JSON file: {describe(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def describe(error: Exception) -> str:
    """Return an error of reading a file as one short line, without the path and the file that libraries repeat."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN_CHARS else line[: MAX_SHOWN_CHARS - 3] + "..."
