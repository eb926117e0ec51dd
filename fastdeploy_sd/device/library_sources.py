"""Of which sources a native library was compiled, so that one of others is not taken for it and read past its structs.

A library lists its sources with a digest of each. A checkout has the sources next to the package, so they are compared.
An installed package has none, so the versions are compared. Loads no library.
"""

from __future__ import annotations

import hashlib
import pathlib

from fastdeploy_sd import __version__

# Where a checkout has the sources.
SOURCES = pathlib.Path(__file__).resolve().parents[2] / "custom_ops"


def other_source(listed: str) -> str | None:
    """Return the first source that a library was compiled from and that is not what is here, None if all is the same.

    Args:
        listed: the package's version, then a line `path SHA-256` for every source, by its path below custom_ops/.
            Without sources the version is compared.
    """
    version, *sources = listed.splitlines()
    if not SOURCES.joinpath("include", "fdsd").is_dir():
        return None if version == __version__ else f"fastdeploy_sd {version}, not {__version__}"
    for name, digest in map(str.split, sources):
        path = SOURCES / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return f"another {path}"
    return None
