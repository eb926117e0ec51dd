"""Folders of this program on a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where what can be made again is kept: under $FDSD_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("FDSD_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return base / "fastdeploy_sd"
