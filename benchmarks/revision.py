"""Which state of this checkout is measured."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What is built and run: new files elsewhere, e.g. records, change no figure.
_SOURCES = ("benchmarks", "custom_ops", "fastdeploy_sd")
_SUFFIXES = frozenset({".cc", ".h", ".py"})
_DIGEST_LEN = 8


def revision(root: Path = ROOT) -> str | None:
    """The commit of a checkout, None where there is none.

    With uncommitted changes "-dirty-" and a digest of them follow, so that two states of the sources never have the
    same name.
    """
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "diff", "HEAD", "--binary")
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *_SOURCES)
    if commit is None or changes is None or untracked is None:
        return None
    digest = hashlib.sha256(changes)
    names = [name for name in untracked.decode().split("\0") if Path(name).suffix in _SUFFIXES]
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    is_dirty = bool(changes or names)
    return commit.decode().strip() + (f"-dirty-{digest.hexdigest()[:_DIGEST_LEN]}" if is_dirty else "")


def _git(root: Path, *arguments: str) -> bytes | None:
    """What a git command prints, None when it fails or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
