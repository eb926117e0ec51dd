"""Kernels for a machine's GPU are found where they are installed, or built once from what an installation has."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pathlib
import shutil
import sys
import zipfile

import pytest

from custom_ops import build, cuda_build, cuda_package
from fastdeploy_sd.device.cuda import kernels
from fastdeploy_sd.device.cuda.library import CudaLibrary, usable_library
from fastdeploy_sd.errors import ConfigError

# Takes the place of nvcc: notes what it compiles, and fails at linear.cu where it is told to.
NVCC = """#!/bin/sh
folder=$(dirname "$0")
[ "$1" = --version ] && { echo "release 13.9, V13.9.1"; exit; }
for out; do :; done
case "$*" in
*-shared*) echo library > "$out"; exit ;;
*linear.cu*) [ ! -e "$folder/fails" ] || { echo "linear.cu(7): error: no such thing" >&2; exit 2; } ;;
esac
echo "$*" >> "$folder/compiled"
sleep 0.02
: > "$out"
"""


@pytest.fixture
def nvcc(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a compiler, in an installation that has what a wheel ships."""
    package = tmp_path / "site" / "fastdeploy_sd"
    for path in cuda_build.shipped_files():
        copy = package / "csrc" / path.relative_to(build.ROOT.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    shutil.copy(build.ROOT.parent / "fastdeploy_sd" / "__init__.py", package)
    (tmp_path / "nvcc").write_text(NVCC)
    (tmp_path / "nvcc").chmod(0o755)
    for name, value in {"NVCC": tmp_path / "nvcc", "FDSD_CACHE_DIR": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(kernels, "source_root", lambda: package / "csrc" / "custom_ops")
    return tmp_path


@pytest.mark.slow
def test_missing_kernels_are_built_once_for_the_gpu_alone(nvcc: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.kept("9.0", may_build=False) is None
    with caplog.at_level(logging.INFO), concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: kernels.kept("9.0", may_build=True), range(2))
    assert first == second
    assert first is not None
    assert first.read_text() == "library\n"
    commands = (nvcc / "compiled").read_text().splitlines()
    num_files = len(cuda_build.kernel_sources()) + 7
    assert len(commands) == num_files
    assert all("-gencode arch=compute_90a,code=sm_90a" in command for command in commands)
    assert f"kernels: {num_files} of {num_files} files compiled" in caplog.text
    assert "another process builds" in caplog.text
    assert {path.name for path in first.parent.iterdir()} == {first.name, "lock"}
    (nvcc / "nvcc").unlink()  # what is there is used without a compiler
    assert kernels.kept("9.0", may_build=True) == first
    assert kernels.kept("8.0", may_build=False) is None


@pytest.mark.slow
def test_a_build_that_fails_says_what_the_compiler_did_and_the_next_one_starts_anew(nvcc: pathlib.Path) -> None:
    (nvcc / "fails").touch()
    with pytest.raises(ConfigError, match=r"(?s)GPU of 8.9 cannot.*linear.cu\(7\): error.*fastdeploy_sd\[gpu\]"):
        kernels.kept("8.9", may_build=True)
    (nvcc / "fails").unlink()
    assert kernels.kept("8.9", may_build=False) is None
    assert kernels.kept("8.9", may_build=True) is not None
    with pytest.raises(
        ConfigError, match=r"expected a GPU that runs code for one of sm_80, .*, got one of capability 7.5"
    ):
        kernels.kept("7.5", may_build=True)


@pytest.mark.slow
def test_other_sources_and_another_compiler_have_a_library_of_their_own(nvcc: pathlib.Path) -> None:
    first = kernels.kept("9.0", may_build=True)
    (nvcc / "nvcc").write_text(NVCC.replace("13.9.1", "13.9.2"))
    assert kernels.kept("9.0", may_build=False) is None
    (nvcc / "nvcc").write_text(NVCC)
    assert kernels.kept("9.0", may_build=False) == first
    with (nvcc / "site" / "fastdeploy_sd" / "csrc" / "custom_ops" / "cuda" / "norm.cu").open("a") as source:
        source.write("// more\n")
    assert kernels.kept("9.0", may_build=False) is None


def test_libraries_that_were_used_last_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each architecture by itself; what a process has loaded goes on working without its file."""
    version = "1"
    monkeypatch.setattr(cuda_package, "_compiler_version", lambda _: version)
    monkeypatch.setattr(cuda_package, "_build_kept", lambda library, *_: library.touch())
    monkeypatch.setattr(cuda_package, "KEPT", 2)

    def keep(capability: str) -> pathlib.Path:
        for place, path in enumerate(sorted(tmp_path.glob("*.so"), key=lambda path: path.stat().st_mtime)):
            os.utime(path, (place, place))
        found = cuda_package.keep(tmp_path, capability, str, may_build=True)
        assert found is not None
        return found

    first, other = keep("9.0"), keep("8.0")
    version = "2"
    second = keep("9.0")
    version = "1"
    assert keep("9.0") == first
    version = "3"
    third = keep("9.0")
    assert {path for path in tmp_path.iterdir() if path.suffix == ".so"} == {first, other, third}
    assert second not in (first, third)


def test_a_wheel_of_kernels_is_found_where_it_is_installed(nvcc: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FDSD_CUDA_LIBRARY", raising=False)
    monkeypatch.setenv("FDSD_CUDA_CAPABILITY", cuda_package.EMULATED_GPU)
    assert "the start of a server with `--device gpu` builds them" in str(usable_library())
    wheel = cuda_package.write_wheel(cuda_build.build_emulated(), nvcc)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(nvcc / "installed")
    monkeypatch.syspath_prepend(nvcc / "installed")
    found = usable_library()
    assert isinstance(found, CudaLibrary)
    assert found.path == nvcc / "installed" / "fastdeploy_sd_cuda" / kernels.NAME
    assert found.architectures == ", ".join(f"sm_{name}" for name in cuda_build.ARCHITECTURES)
    sys.modules.pop("fastdeploy_sd_cuda", None)


@pytest.mark.parametrize(
    ("capability", "name"), [("8.0", "80"), ("9.0", "90a"), ("10.3", "100"), ("emulated", "emulated")]
)
def test_every_gpu_has_the_greatest_architecture_that_runs_there(capability: str, name: str) -> None:
    assert cuda_package.architecture_of(capability) == name
