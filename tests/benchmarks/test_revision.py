"""What a record says it was measured of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.revision import revision


def test_every_state_of_the_sources_has_a_revision_of_its_own(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert revision(tmp_path) is None
    git("init")
    assert revision(tmp_path) is None
    source = tmp_path / "custom_ops" / "a.cc"
    source.parent.mkdir()
    source.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = revision(tmp_path)
    assert clean is not None
    assert clean.isalnum()
    (tmp_path / "custom_ops" / "record.json").write_text("{}")
    assert revision(tmp_path) == clean, "a file that is no source"
    seen = [clean]
    for text in ("2", "3"):
        source.write_text(text)
        seen.append(str(revision(tmp_path)))
    new = source.with_name("b.cc")
    for text in ("4", "5"):
        new.write_text(text)
        seen.append(str(revision(tmp_path)))
    assert len(set(seen)) == len(seen)
    assert all(name.startswith(f"{clean}-dirty-") for name in seen[1:])
    source.write_text("1")
    new.unlink()
    assert revision(tmp_path) == clean
