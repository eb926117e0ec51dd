"""Builds the kernel library into the package; everything else is declared in pyproject.toml. Needs no Paddle."""

from __future__ import annotations

import ctypes
import functools
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from custom_ops import build as custom_ops  # noqa: E402
from custom_ops import cuda_build  # noqa: E402

LIBRARY = Path("fastdeploy_sd", "lib", "libfdsd.so")
SOURCES = Path("fastdeploy_sd", "csrc")


class BuildKernels(build_ext):
    """Compiles libfdsd.so, and the Paddle operators where Paddle can be imported; ships sources of what is built later.

    These are the operators for another Paddle, when eager execution is asked for, and the CUDA kernels for the GPU of a
    machine. An editable install builds into the checkout and uses its sources where they are.
    """

    # The operators in the wheel, if they were compiled.
    _operators: Path | None = None

    def run(self) -> None:
        if self.inplace:
            self._build(ROOT / LIBRARY.parent, "release", custom_ops.STRICT_FLAGS)
            return
        target = Path(self.build_lib)
        self._build(target / LIBRARY.parent, "package", [])
        for source in self._shipped_sources():
            copy = target / SOURCES / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        self._operators = build_operators(target / LIBRARY)

    def get_outputs(self) -> list[str]:
        target = Path(self.build_lib)
        sources = [target / SOURCES / source.relative_to(ROOT) for source in self._shipped_sources()]
        built = [target / LIBRARY, *([] if self._operators is None else [self._operators])]
        return [] if self.inplace else [str(path) for path in [*built, *sources]]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        folder = ROOT / "custom_ops"
        found = [p for p in folder.rglob("*") if p.suffix in {".cc", ".cu", ".h", ".py"}]
        return [str(path.relative_to(ROOT)) for path in found]

    @staticmethod
    def _shipped_sources() -> list[Path]:
        return [ROOT / "custom_ops" / "bindings" / "paddle_binding.h", *cuda_build.shipped_files()]

    @staticmethod
    def _build(out: Path, name: str, extra: list[str]) -> None:
        try:
            custom_ops.build_library(out, ROOT / "build" / name, extra)
        except custom_ops.BuildError as error:
            sys.exit(f"fastdeploy_sd: the kernel library cannot be built: {error}")


def build_operators(library: Path) -> Path | None:
    """Compile the operators beside the kernel library, for the Paddle of this environment.

    Returns:
        The file; None where there is no Paddle (as in an isolated build) or it cannot be compiled against, which is no
        reason to stop: the server does without them unless `enforce_eager` is set.
    """
    try:
        import paddle  # noqa: PLC0415 (absent from isolated builds, as is all that our package needs)
    except ImportError:
        return None
    from fastdeploy_sd.device.layout import read_layout  # noqa: PLC0415
    from fastdeploy_sd.device.program import operator_files  # noqa: PLC0415
    from fastdeploy_sd.device.program.operator_source import operator_source  # noqa: PLC0415
    from fastdeploy_sd.errors import ConfigError  # noqa: PLC0415
    from fastdeploy_sd.ops.operators import declared_ops  # noqa: PLC0415

    install = operator_files.PaddleInstall(Path(paddle.__file__).parent, paddle.__version__, paddle.version.commit)
    root = ROOT / "custom_ops"
    layout = functools.partial(read_layout, ctypes.CDLL(str(library)))
    source = operator_source(declared_ops(), (header.name for header in operator_files.headers(root)), layout)
    out = library.parent / operator_files.file_name(root, install, source, operator_files.BESIDE)
    try:
        compiler = custom_ops.find_compiler()
        operator_files.compile_operators(compiler, install, source, library, out, library_folder=operator_files.BESIDE)
    except (ConfigError, custom_ops.BuildError) as error:
        print(f"fastdeploy_sd: without operators for Paddle {install.version}: {error}", file=sys.stderr)
        return None
    return out


# The extension is named so that the wheel is tagged for this platform; BuildKernels knows its sources.
setup(ext_modules=[Extension("fastdeploy_sd.lib.libfdsd", sources=[])], cmdclass={"build_ext": BuildKernels})
