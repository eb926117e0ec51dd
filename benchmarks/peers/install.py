"""Installs each peer into build/peers/<peer>/venv, builds llama.cpp, and converts the checkpoint. What exists stays."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.catalogue import (
    CHECKPOINT,
    LLAMA_BIN,
    LLAMA_DIR,
    LLAMA_SOURCE,
    LLAMA_VERSION,
    PEERS,
    PEERS_DIR,
    REQUIREMENTS_DIR,
    ROOT,
    model_path,
    venv,
)
from benchmarks.peers.counting_checkpoint import make_counting_checkpoint
from fastdeploy_sd.errors import FdsdError

_LLAMA_TARGETS = ("llama-server", "llama-quantize", "llama", "mtmd")
_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip
# Other packages ask for these, text models do not use them, and one that is built for another torch breaks the import.
_UNWANTED: Mapping[str, Sequence[str]] = {
    "openvino": ("torchvision",),
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}
# Its name up to Debian 12, and since.
_TCMALLOC_PACKAGES = ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")


def install(peer: str, jobs: int) -> None:
    """Install one peer unless its requirements are installed already.

    Args:
        jobs: compilers at a time.

    Raises:
        FdsdError: a command failed; its own message is above.
    """
    requirements = REQUIREMENTS_DIR / f"{peer}.txt"
    stamp = venv(peer) / "installed"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not (stamp.exists() and stamp.read_text(encoding="ascii").strip() == wanted):
        run_command([sys.executable, "-m", "venv", "--clear", str(venv(peer))])
        pip = [str(venv(peer) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        run_command([*pip, "install", "--quiet", "-r", str(requirements)])
        if peer in _UNWANTED:
            run_command([*pip, "uninstall", "--quiet", "--yes", *_UNWANTED[peer]])
        stamp.write_text(wanted + "\n", encoding="ascii")
    if peer == "llamacpp":
        _build_llama(jobs)
    elif peer == "vllm":
        _fetch_tcmalloc()


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path = ROOT) -> None:
    """Run a command to its end.

    Raises:
        FdsdError: its exit status is not 0, or there is no such program.
    """
    print("+ " + " ".join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, env=environment, cwd=cwd, check=False)
    except FileNotFoundError:
        raise FdsdError(f"setup: expected the program {command[0]}, found none") from None
    if done.returncode != 0:
        raise FdsdError(f"setup: expected exit status 0, got {done.returncode} from: {' '.join(command)}")


def _build_llama(jobs: int) -> None:
    """Build the llama.cpp that the binding's source distribution carries; repeated builds are incremental."""
    if not LLAMA_SOURCE.exists():
        _fetch_llama()
    build = LLAMA_DIR / "build"
    is_configured = (build / "CMakeCache.txt").exists()  # and stays with its generator
    generator = ["-G", "Ninja"] if shutil.which("ninja") and not is_configured else []
    run_command(
        ["cmake", *generator, "-S", str(LLAMA_SOURCE / "vendor" / "llama.cpp"), "-B", str(build), *_LLAMA_OPTIONS]
    )
    run_command(["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *_LLAMA_TARGETS])


def _fetch_llama() -> None:
    """Unpack the source distribution; its folder appears only when complete."""
    pip = [str(venv("llamacpp") / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    name = "llama-cpp-python"
    download = ["download", "--quiet", "--no-deps", "--no-binary", name, "--dest", str(LLAMA_DIR)]
    run_command([*pip, *download, f"{name}=={LLAMA_VERSION}"])
    partial = LLAMA_DIR / "unpacked"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    archive = LLAMA_SOURCE.with_name(LLAMA_SOURCE.name + ".tar.gz")
    run_command(["tar", "--extract", "--gzip", "--file", str(archive), "--directory", str(partial)])
    (partial / LLAMA_SOURCE.name).rename(LLAMA_SOURCE)
    partial.rmdir()


def _fetch_tcmalloc() -> None:
    """Fetch what vLLM's documentation asks for; where Debian's package cannot be had, say that it runs without."""
    folder = PEERS_DIR / "vllm" / "tcmalloc"
    if folder.exists() or not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    partial = folder.with_name("packages")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in _TCMALLOC_PACKAGES:
        try:
            run_command(["apt-get", "download", "--quiet", name], cwd=partial)
        except FdsdError:
            continue
        [package] = partial.glob(f"{name}_*.deb")
        run_command(["dpkg-deb", "--extract", str(package), str(partial / "files")])
        (partial / "files").rename(folder)
        return
    print("setup: no package of tcmalloc can be downloaded; vLLM will run without", file=sys.stderr)


def convert(peers: Collection[str]) -> None:
    """Make what these peers load.

    Raises:
        FdsdError: a converter failed; its own message is above.
    """
    if not CHECKPOINT.exists():
        make_counting_checkpoint(CHECKPOINT)
    if "llamacpp" in peers:
        _convert_llama()
    if "openvino" in peers:
        _convert_openvino()


def _convert_llama() -> None:
    """Convert to bfloat16 in the environment of transformers, as llama.cpp's converter needs PyTorch; quantise that."""
    wide = model_path("llamacpp", "bf16")
    if not wide.exists():
        partial = wide.with_suffix(".partial")
        run_command(
            [str(venv("transformers") / "bin" / "python"), "-m", "benchmarks.peers.workers.gguf_converter",
             str(LLAMA_SOURCE / "vendor" / "llama.cpp"), str(CHECKPOINT), str(partial)],
        )  # fmt: skip
        partial.rename(wide)
    for fmt in PEERS["llamacpp"].formats.values():
        path = model_path("llamacpp", fmt)
        if not path.exists():
            partial = path.with_suffix(".partial")
            run_command([str(LLAMA_BIN / "llama-quantize"), str(wide), str(partial), fmt.upper()])
            partial.rename(path)


def _convert_openvino() -> None:
    """The exporter names the weights; with fp16 the processor computes in bfloat16 where it can."""
    for fmt in PEERS["openvino"].formats.values():
        path = model_path("openvino", fmt)
        if path.exists():
            continue
        partial = Path(f"{path}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        exporter = str(venv("openvino") / "bin" / "optimum-cli")
        arguments = ["--task", "text-generation-with-past", "--weight-format", fmt, str(partial)]
        run_command(
            [exporter, "export", "openvino", "--model", str(CHECKPOINT), *arguments],
            environment={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=ROOT,
        )
        partial.rename(path)
