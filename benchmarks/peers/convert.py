"""Writes the counting checkpoint and converts it for the peers that do not read it as it is. What is there stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.counting_checkpoint import make_counting_checkpoint
from benchmarks.peers.install import run_command
from benchmarks.peers.paths import CHECKPOINT, LLAMA_BIN, LLAMA_SOURCE, ROOT, model_path, venv


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
    """bfloat16 by llama.cpp's converter, which needs PyTorch and so runs beside transformers; the rest from that."""
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
