"""A library of CUDA kernels is taken only with the sources, or the version, that it was compiled from."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from custom_ops import build, cuda_build
from fastdeploy_sd.device import library as host_library
from fastdeploy_sd.device.cuda.library import cuda_refusal
from fastdeploy_sd.device.library import LIBRARY_PATH


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what the emulated library was compiled from, which is what the checkout has."""
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(cuda_build.build_emulated()))
    copy = shutil.copytree(build.ROOT, tmp_path / "custom_ops", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(host_library, "SOURCES", copy)
    assert cuda_refusal() is None
    return copy


@pytest.mark.parametrize("name", ["cuda/linear.cu", "cuda/numbers.h", "include/fdsd/linear.h", "bindings/c_api.h"])
def test_a_library_of_other_sources_is_refused(sources: pathlib.Path, name: str) -> None:
    with (sources / name).open("a") as source:
        source.write("// more\n")
    refusal = str(cuda_refusal())
    assert refusal.endswith(f" is of another {sources / name}; `python custom_ops/cuda_build.py --nvcc` makes it anew")
    (sources / name).unlink()
    assert cuda_refusal() == refusal


def test_the_emulation_is_no_source_of_kernels(sources: pathlib.Path) -> None:
    shutil.rmtree(sources / "cuda" / "emulation")
    assert cuda_refusal() is None


def test_without_sources_the_version_must_be_the_same(sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(sources)
    assert cuda_refusal() is None
    monkeypatch.setattr(host_library, "__version__", "9.9")
    assert "is of fastdeploy_sd 0.1.0, not 9.9" in str(cuda_refusal())


def test_every_file_that_a_compiler_read_is_a_source() -> None:
    folder = cuda_build.build_emulated().parent
    read = {
        pathlib.Path(path).resolve()
        for unit in cuda_build.emulated_units(folder)
        for path in unit.obj.with_suffix(".d").read_text().partition(":")[2].replace("\\\n", " ").split()
    }
    wanted = {path for path in read if build.ROOT in path.parents and cuda_build.CUDA / "emulation" not in path.parents}
    assert wanted <= set(cuda_build.compiled_sources())


def test_a_library_from_before_there_was_such_a_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(LIBRARY_PATH))  # one without any of the functions
    assert (refusal := cuda_refusal()) is not None
    assert f"{LIBRARY_PATH} is of an older version" in refusal
