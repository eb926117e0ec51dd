"""Paddle operators are found or compiled when they are loaded, never in a call; the file that fits is the one used."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from custom_ops import cuda_build
from fastdeploy_sd.device.layout import layout
from fastdeploy_sd.device.library import LIBRARY_PATH
from fastdeploy_sd.device.program import operator_files, paddle_ops
from fastdeploy_sd.device.program.operator_source import operator_source
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.operators import declared_ops
from fastdeploy_sd.types.folders import cache_folder

pytestmark = pytest.mark.slow

SOURCE = '#include "paddle_binding.h"\n'
PADDLE = operator_files.PaddleInstall(pathlib.Path("paddle"), "3.1.0", "abc")


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty folder to keep compiled operators in."""
    monkeypatch.setenv("FDSD_CACHE_DIR", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def shipped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The package's lib folder, in which an installation may bring operators."""
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.setattr(operator_files, "LIBRARY_PATH", folder / LIBRARY_PATH.name)
    return folder


def test_a_call_before_loading_is_an_error_and_compiles_nothing(cache: pathlib.Path) -> None:
    code = """
import paddle
from fastdeploy_sd.ops.rowwise import swiglu
from fastdeploy_sd.device.program import paddle_ops
try:
    swiglu(paddle.zeros([1, 2]))
except paddle_ops.OperatorsNotLoadedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "op swiglu: expected load() when the model is loaded" in done.stdout
    assert not cache.exists()


def test_a_file_that_is_there_needs_no_compiler(
    cache: pathlib.Path, shipped: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    root = operator_files.source_root()
    kept = cache / operator_files.file_name(root, PADDLE, SOURCE, str(shipped))
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert operator_files.find_or_compile(PADDLE, SOURCE) == kept
    brought = shipped / operator_files.file_name(root, PADDLE, SOURCE, operator_files.BESIDE)
    brought.touch()
    assert operator_files.find_or_compile(PADDLE, SOURCE) == brought
    # Neither fits another Paddle.
    for other in (dataclasses.replace(PADDLE, version="3.2.0"), dataclasses.replace(PADDLE, commit="abd")):
        with pytest.raises(ConfigError, match="Paddle operators: expected a C\\+\\+ compiler"):
            operator_files.find_or_compile(other, SOURCE)


def test_the_name_follows_the_sources(tmp_path: pathlib.Path) -> None:
    root = pathlib.Path(shutil.copytree(operator_files.source_root(), tmp_path / "sources"))
    before = operator_files.file_name(root, PADDLE, SOURCE, operator_files.BESIDE)
    header = root / "include" / "fdsd" / "sampling.h"
    header.write_text(header.read_text() + "\n")
    after = operator_files.file_name(root, PADDLE, SOURCE, operator_files.BESIDE)
    assert after != before
    assert operator_files.file_name(root, PADDLE, SOURCE + "\n", operator_files.BESIDE) != after


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="got CXX=no-such-compiler, which is none"):
        operator_files.find_or_compile(PADDLE, SOURCE)


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CACHE_DIR", "/dev/null/x")
    with pytest.raises(ConfigError, match=r"FDSD_CACHE_DIR: expected .*, got /dev/null/x/.*: Not a directory"):
        operator_files.find_or_compile(PADDLE, SOURCE)


def test_a_compile_error_is_one_line_and_its_output_is_logged(
    cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against a Paddle without headers."""
    with pytest.raises(
        ConfigError, match=r"Paddle operators: expected \S+ to compile them, got exit status 1"
    ) as caught:
        operator_files.find_or_compile(PADDLE, SOURCE)
    assert "\n" not in caught.value.message
    assert caplog.text.count("fatal error: paddle/") == 1
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_an_isolated_build_needs_nothing_that_is_installed() -> None:
    """pip builds where neither Paddle nor any other package of ours is."""
    code = """
import pathlib, sys, setuptools
sys.modules |= dict.fromkeys(["numpy", "paddle"])
setuptools.setup = lambda **_: None
import setup
print(setup.build_operators(pathlib.Path("lib.so")), len(set(setup.BuildKernels._shipped_sources())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    sources = {*operator_files.shipped_files(operator_files.source_root()), *cuda_build.shipped_files()}
    assert (done.stdout, done.stderr) == (f"None {len(sources)}\n", "")


def test_a_wheel_built_where_paddle_is_brings_operators_that_load(tmp_path: pathlib.Path) -> None:
    """By what setup.py calls; the package they are in lies elsewhere than it was built, as an installed one does."""
    lib = tmp_path / "build" / "lib"
    lib.mkdir(parents=True)
    shutil.copy(LIBRARY_PATH, lib)
    code = """
import pathlib, sys, setuptools
setuptools.setup = lambda **_: None
import setup
print(setup.build_operators(pathlib.Path(sys.argv[1])))
"""
    library = lib / LIBRARY_PATH.name
    done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True, check=True)
    root = operator_files.source_root()
    source = operator_source(declared_ops(), (path.name for path in operator_files.headers(root)), layout)
    name = operator_files.file_name(root, paddle_ops.installed_paddle(), source, operator_files.BESIDE)
    assert done.stdout.split()[-1] == str(lib / name), done.stderr
    installed = lib.rename(tmp_path / "site")
    # The directory is gone that the compiler saw, so only the installed library can be found.
    dump = subprocess.run(["readelf", "-d", installed / name], capture_output=True, text=True, check=True).stdout
    assert "libfdsd.so" in dump
    assert "$ORIGIN" in dump
    load = "import ctypes, sys, paddle; ctypes.CDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, installed / name], check=True, env={**os.environ, "PATH": ""})
