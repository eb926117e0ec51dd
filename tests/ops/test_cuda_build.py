"""nvcc compiles every kernel, and what they take of a GPU stays within bounds."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from custom_ops import build, cuda_build, cuda_report
from fastdeploy_sd.device.cuda import library as cuda_library
from fastdeploy_sd.device.layout import layout
from fastdeploy_sd.device.program import operator_files, paddle_ops
from fastdeploy_sd.device.program.operator_source import operator_source
from fastdeploy_sd.ops.operators import declared_ops
from tests.ops.cuda_device import gpu_refusal

pytestmark = pytest.mark.long

# Static shared memory that every block may have.
MAX_SHARED_BYTES = 48 * 1024
MAX_REGISTERS = 255
# The one whose code has every kernel: those by warpgroups, and those of all other chips. Only of products without
# warpgroups is the code another one there, so they are compiled for the chip that takes the most registers, too.
# `cuda_build.py --nvcc` compiles for all, and reports them: attention alone takes two minutes for each.
ARCHITECTURE, WITHOUT_WARPGROUPS = "90a", ("linear.cu", "120")


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        cuda_build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    return cuda_build.build_cuda(cuda_build.BUILD / "cuda-tested", [ARCHITECTURE], more=[WITHOUT_WARPGROUPS])


def test_kernels_spill_no_registers(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uses = cuda_report.report(library.parent)
    with capsys.disabled():
        print("\n" + "\n".join(cuda_report.report_lines(uses)))
    assert {use.architecture for use in uses} == {f"sm_{ARCHITECTURE}", f"sm_{WITHOUT_WARPGROUPS[1]}"}
    assert not [use for use in uses if use.spilled_bytes > 0]
    assert not [use for use in uses if use.registers > MAX_REGISTERS or use.shared_bytes > MAX_SHARED_BYTES]


def test_the_library_loads_without_a_driver(library: Path, tmp_path: Path) -> None:
    name = tmp_path / library.name  # one that the process has loaded nothing by
    name.symlink_to(library)
    loaded = ctypes.CDLL(str(name))
    assert all(hasattr(loaded, f"fdsd_cuda_{name}") for name in ("allocate", "rms_norm"))


def test_a_gpu_without_a_driver_is_refused_with_the_reason(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu_refusal() is None:
        pytest.skip("there is a GPU here")
    name = tmp_path / library.name  # one that the process has loaded nothing by
    name.symlink_to(library)
    monkeypatch.setenv("FDSD_CUDA_LIBRARY", str(name))
    assert re.search("driver", str(cuda_library.cuda_refusal()))


def test_the_paddle_operators_compile_for_a_paddle_with_cuda(tmp_path: Path) -> None:
    """Whose headers include CUDA's, and declare what a Paddle without it has not. Host code only: no nvcc runs."""
    try:
        cuda_flags = cuda_build.include_flags()
    except build.BuildError as error:
        pytest.skip(str(error))
    root, paddle = operator_files.source_root(), paddle_ops.installed_paddle()
    text = operator_source(declared_ops(), (header.name for header in operator_files.headers(root)), layout)
    # Only there is a tensor's stream declared.
    text += "auto StreamOf(const paddle::Tensor& tensor) { return tensor.stream(); }\n"
    source = tmp_path / "operators.cc"
    source.write_text(text)
    flags = [*operator_files.FLAGS, *operator_files.include_flags(root, paddle)]
    command = [operator_files.find_compiler(), *flags, "-fsyntax-only", str(source)]
    with_cuda = subprocess.run(
        [*command, "-DPADDLE_WITH_CUDA", *cuda_flags], capture_output=True, text=True, check=False
    )
    assert with_cuda.returncode == 0, with_cuda.stderr[-4000:]


def test_the_sanitizer_says_why_it_cannot_run() -> None:
    if gpu_refusal() is None:
        pytest.skip("there is a GPU here")
    script = Path(__file__).parents[2] / "scripts" / "cuda_sanitize.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "cuda_sanitize: expected " in done.stderr
