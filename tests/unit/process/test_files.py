"""Only regular files are read, none is waited for, and every fault is one line."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.models.checkpoint import SafetensorsFile
from fastdeploy_sd.process.files import MAX_JSON_BYTES, open_regular, read_json, read_text
from fastdeploy_sd.text.tokenizer import load_tokenizer

KINDS: dict[str, Callable[[pathlib.Path], None]] = {
    "FIFO": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "link to nothing": lambda path: os.symlink("nowhere", path),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "config.json"
    KINDS[kind](path)
    with pytest.raises(OSError, match=kind):
        open_regular(path)
    with pytest.raises(CheckpointError, match=rf"config\.json: expected a readable JSON file: .*{kind}"):
        read_json(path, missing_ok=True)
    with pytest.raises(CheckpointError, match=kind):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_no_file_of_a_tokenizer_is_waited_for(tmp_path: pathlib.Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}: expected .*got a FIFO"):
        load_tokenizer(tmp_path)


def test_a_link_to_a_file_is_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json(tmp_path / "config.json") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "expected a readable JSON file: .*recursion"),
        ('{"a": ' + "9" * 5000 + "}", "expected a readable JSON file: .*4300 digits"),
        ('{"a": 1', "expected a readable JSON file: "),
        ("[1]", "expected a JSON object, got list"),
        ('{"eos_token": "\\uD800"}', "expected a readable JSON file: .*surrogates not allowed"),
    ],
)
def test_a_fault_of_a_json_file_is_one_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_json(path)
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 500


def test_a_pair_of_escapes_is_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "config.json") == {"a": "\U0001f600"}


def test_a_file_beyond_all_measure_is_not_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=f"expected at most {MAX_JSON_BYTES} bytes, got {1 << 40}"):
        read_json(path)
    with pytest.raises(OSError, match="expected at most"):
        read_text(path)


def test_a_missing_file_is_no_empty_one_unless_that_is_meant(tmp_path: pathlib.Path) -> None:
    assert read_json(tmp_path / "none", missing_ok=True) == {}
    with pytest.raises(CheckpointError, match="none: expected a JSON file, found none"):
        read_json(tmp_path / "none")
