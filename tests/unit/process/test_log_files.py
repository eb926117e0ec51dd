"""Log files: where, how large, and what is not written to."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process import log_files
from fastdeploy_sd.process.log_files import NUM_OLD_FILES, LogFile, line_formatter

Open = Callable[..., LogFile]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    files: list[LogFile] = []

    def open_file(process: str = "server", folder: Path = tmp_path / "a" / "b") -> LogFile:
        files.append(LogFile(folder, process))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


def write(file: LogFile, text: str) -> None:
    file.emit(logging.LogRecord("n", logging.INFO, "p", 1, text, None, None))


def test_a_file_is_appended_to_in_a_new_folder(opened: Open, tmp_path: Path) -> None:
    for text in ("one", "two"):
        file = opened()
        write(file, text)
        file.close()
    path = tmp_path / "a" / "b" / "server.log"
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o007 == 0


def test_processes_of_one_name_have_a_file_each_and_reuse_free_names(opened: Open) -> None:
    first, second = opened("http"), opened("http")
    assert [Path(file.baseFilename).name for file in (first, second)] == ["http.log", "http-2.log"]
    first.close()
    assert Path(opened("http").baseFilename).name == "http.log"


def test_the_size_is_bounded(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_FILE_BYTES", 1000)
    file = opened()
    for number in range(200):
        write(file, f"{number:0100d}")
    found = sorted(path.name for path in (tmp_path / "a" / "b").glob("server.log*"))
    assert found == ["server.log", *(f"server.log.{i}" for i in range(1, NUM_OLD_FILES + 1))]
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "a" / "b").glob("server.log*"))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_regular_file_is_not_opened(opened: Open, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "server.log"
    if kind == "link":
        path.symlink_to(tmp_path / "victim")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match="FD_LOG_DIR: expected a folder for log files, got "):
        opened(folder=tmp_path)
    assert not (tmp_path / "victim").exists()


def test_a_folder_that_cannot_be_made_is_an_error(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"FD_LOG_DIR: expected a folder for log files, got '.*file': File exists"):
        opened(folder=tmp_path / "file")


def test_a_failed_write_is_said_once(opened: Open, capsys: pytest.CaptureFixture[str]) -> None:
    file = opened()
    assert file.stream is not None
    file.stream.close()
    full = os.open("/dev/full", os.O_WRONLY)
    file.stream = os.fdopen(full, "w")
    for _ in range(3):
        write(file, "lost")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "server.log: [Errno 28] No space left on device" in lines[0]


def test_a_line_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_LOG_FORMAT", "json")
    record = logging.LogRecord("n", logging.WARNING, "p", 1, "two\n%s", ("lines",), None)
    record.created, record.fields = 1.5, {"id": "cmpl-1", "status": 200}
    assert json.loads(line_formatter("http").format(record)) == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "WARNING",
        "process": "http",
        "message": "two\nlines",
        "id": "cmpl-1",
        "status": 200,
    }
    assert "\n" not in line_formatter("http").format(record)


def test_a_format_of_lines_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_LOG_FORMAT", "JSON")
    with pytest.raises(ConfigError, match="FD_LOG_FORMAT: expected text or json, got 'JSON'"):
        line_formatter("http")
