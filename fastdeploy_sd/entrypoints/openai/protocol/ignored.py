"""Logs names that clients sent and that this server ignores, once each. Knows no field by name."""

from __future__ import annotations

import logging
import threading

from fastdeploy_sd.errors import MAX_SHOWN_CHARS

logger = logging.getLogger(__name__)

# A client that makes up names must not fill the log.
_MAX_NAMES = 64
_lock = threading.Lock()
_told: set[str] = set()


def tell_ignored(where: str, name: str) -> None:
    """Log that `name`, met in `where`, has no effect; the first time only, and of the first few dozen names."""
    text = f"{where}: {name[:MAX_SHOWN_CHARS]!r}"
    if text in _told or len(_told) >= _MAX_NAMES:
        return
    with _lock:
        if text in _told or len(_told) >= _MAX_NAMES:
            return
        _told.add(text)
    logger.warning("%s is left aside: this server has no use for it (said once)", text)
