"""Setting peers up: what cannot be had, and what is left by a command that failed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks.peers import install
from fastdeploy_sd.errors import FdsdError


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs are found before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def add_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)


@pytest.fixture
def tcmalloc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it would be put."""
    monkeypatch.setattr(install, "PEERS_DIR", tmp_path)
    (tmp_path / "vllm").mkdir()
    return tmp_path / "vllm" / "tcmalloc"


def test_vllm_goes_without_tcmalloc_where_no_package_can_be_had(
    programs: Path, tcmalloc: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_program(programs, "apt-get", "exit 100")
    add_program(programs, "dpkg-deb", "exit 1")
    for _ in range(2):
        install._fetch_tcmalloc()
        assert "vLLM will run without" in capsys.readouterr().err
        assert not tcmalloc.exists()


def test_the_package_is_found_by_either_name(programs: Path, tcmalloc: Path) -> None:
    add_program(programs, "apt-get", 'case "$3" in *t64) touch "$3_1_amd64.deb" ;; *) exit 100 ;; esac')
    add_program(programs, "dpkg-deb", 'mkdir "$3" && touch "$3/library"')
    install._fetch_tcmalloc()
    assert (tcmalloc / "library").exists()


def test_a_package_that_cannot_be_unpacked_leaves_nothing_that_looks_complete(programs: Path, tcmalloc: Path) -> None:
    add_program(programs, "apt-get", 'touch "$3_1_amd64.deb"')
    add_program(programs, "dpkg-deb", 'mkdir "$3" && exit 1')
    with pytest.raises(FdsdError, match="expected exit status 0, got 1 from: dpkg-deb"):
        install._fetch_tcmalloc()
    assert not tcmalloc.exists()


def test_the_source_of_llamacpp_appears_only_when_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "llama_cpp_python-1"
    content = tmp_path / "content"
    content.write_bytes(bytes(range(256)) * 4000)
    archive = tmp_path / "llama_cpp_python-1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(content, "llama_cpp_python-1/vendor/file")
    whole = archive.read_bytes()
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    add_program(python.parent, "python", "exit 0")
    monkeypatch.setattr(install, "LLAMA_DIR", tmp_path)
    monkeypatch.setattr(install, "LLAMA_SOURCE", source)
    monkeypatch.setattr(install, "venv", lambda peer: tmp_path / "venv")
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FdsdError, match="from: tar"):
        install._fetch_llama()
    assert not source.exists()
    archive.write_bytes(whole)
    install._fetch_llama()
    assert (source / "vendor" / "file").read_bytes() == content.read_bytes()
