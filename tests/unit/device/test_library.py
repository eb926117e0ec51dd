"""A kernel library is taken only with the declarations, or the version, that it was built from."""

from __future__ import annotations

import hashlib
import pathlib

import pytest

from custom_ops import build
from fastdeploy_sd.cli import inspection
from fastdeploy_sd.device import library as host_library
from fastdeploy_sd.device.library import LIBRARY_PATH, load
from fastdeploy_sd.errors import ConfigError

HEADER = build.ROOT / "include" / "fdsd" / "controller.h"
DIGEST = hashlib.sha256(HEADER.read_bytes()).hexdigest().encode()


def copy_with(path: pathlib.Path, old: bytes, new: bytes) -> pathlib.Path:
    """Write the library with these bytes in place of others."""
    data = LIBRARY_PATH.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [(DIGEST, DIGEST[::-1], f"another {HEADER}"), (b"fdsd_sources", b"fdsd_nothing", "an older version")],
    ids=["another digest", "no digests"],
)
def test_a_library_of_other_declarations_is_refused(
    old: bytes, new: bytes, got: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_with(tmp_path / "lib.so", old, new)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.message == (
        f"kernel library: expected {path} to be of these sources, got one of {got}; run `scripts/dev build`, "
        "without a checkout install the package anew"
    )
    monkeypatch.setattr(inspection, "LIBRARY_PATH", path)
    assert inspection.environment()["kernel library"] == f"not used: {caught.value.message}"


def test_without_sources_the_version_must_be_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(host_library, "SOURCES", tmp_path)
    load(LIBRARY_PATH)
    monkeypatch.setattr(host_library, "__version__", "9.9")
    with pytest.raises(ConfigError, match=r"got one of fastdeploy_sd 0\.1\.0, not 9\.9; run"):
        load(LIBRARY_PATH)


def test_every_c_function_is_declared_in_a_listed_file() -> None:
    exporting = {
        path
        for folder in ("cpu", "bindings", "include")
        for path in (build.ROOT / folder).rglob("*")
        if path.suffix in (".cc", ".h") and "FDSD_EXPORT" in path.read_text()
    }
    assert exporting <= set(build.interface_sources())
