"""Where the peers, the converted checkpoints and the records lie. Imports nothing, so that workers can use it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS_DIR = ROOT / "build" / "peers"
CHECKPOINT = PEERS_DIR / "checkpoint"
RESULTS_DIR = PEERS_DIR / "results"
REQUIREMENTS_DIR = Path(__file__).resolve().parent / "requirements"
LLAMA_DIR = PEERS_DIR / "llamacpp"
LLAMA_VERSION = "0.3.36"
LLAMA_SOURCE = LLAMA_DIR / f"llama_cpp_python-{LLAMA_VERSION}"
LLAMA_BIN = LLAMA_DIR / "build" / "bin"


def venv(peer: str) -> Path:
    """The virtual environment of a peer."""
    return PEERS_DIR / peer / "venv"


def model_path(peer: str, fmt: str) -> Path:
    """What a peer loads for a weight format of its own naming, e.g. ("llamacpp", "q8_0")."""
    if peer == "llamacpp":
        return LLAMA_DIR / f"{fmt}.gguf"
    if peer == "openvino":
        return PEERS_DIR / peer / fmt
    return CHECKPOINT
