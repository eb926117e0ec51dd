"""Installs each peer into build/peers/<peer>/venv, and builds llama.cpp for this processor. What is there stays."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.paths import LLAMA_DIR, LLAMA_SOURCE, LLAMA_VERSION, PEERS_DIR, REQUIREMENTS_DIR, ROOT, venv
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
        pip = [str(venv("llamacpp") / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        name = "llama-cpp-python"
        download = ["download", "--quiet", "--no-deps", "--no-binary", name, "--dest", str(LLAMA_DIR)]
        run_command([*pip, *download, f"{name}=={LLAMA_VERSION}"])
        with tarfile.open(LLAMA_SOURCE.with_name(LLAMA_SOURCE.name + ".tar.gz")) as archive:
            archive.extractall(LLAMA_DIR, filter="data")
    build = LLAMA_DIR / "build"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run_command(
        ["cmake", *generator, "-S", str(LLAMA_SOURCE / "vendor" / "llama.cpp"), "-B", str(build), *_LLAMA_OPTIONS]
    )
    run_command(["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *_LLAMA_TARGETS])


def _fetch_tcmalloc() -> None:
    """vLLM's documentation asks for tcmalloc; where Debian's packages are not at hand, it runs without."""
    folder = PEERS_DIR / "vllm" / "tcmalloc"
    if folder.exists() or not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return
    packages = PEERS_DIR / "vllm" / "packages"
    packages.mkdir(exist_ok=True)
    run_command(["apt-get", "download", "--quiet", "libtcmalloc-minimal4"], cwd=packages)
    [package] = packages.glob("libtcmalloc-minimal4_*.deb")
    run_command(["dpkg-deb", "--extract", str(package), str(folder)])
