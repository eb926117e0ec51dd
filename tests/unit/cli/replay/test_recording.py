"""Reading recordings: what is a response, and that a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.cli.replay.encoding import WordEncoder, load_encoder
from fastdeploy_sd.cli.replay.recording import Conversation, read_recording
from fastdeploy_sd.errors import ConfigError


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[Conversation]:
    return read_recording(path, WordEncoder())


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_every_assistant_message_is_a_response(tmp_path: Path) -> None:
    talk = [message("user", "one two"), message("assistant", "three"), message("tool", "x"), message("assistant", "y")]
    [conversation] = read(write(tmp_path / "r", {"id": "c", "messages": talk}))
    # Tokens of "user\n", "one two" and the end; "assist" "ant" "\n" before the answer, which is "three" and the end.
    assert conversation.responses == ((5 + 3, 5 + 3 + 2), (10 + 2 + 2 + 3, 17 + 2))
    assert conversation.token_ids.tolist()[8:10] == [WORD_OF_THREE, 0]
    assert len(conversation.token_ids) == 19


WORD_OF_THREE = 7  # user, \n, one, " two", assist, ant come before it


def test_a_first_assistant_message_still_has_its_role_before_it(tmp_path: Path) -> None:
    [conversation] = read(write(tmp_path / "r", {"id": "c", "messages": [message("assistant", "a")]}, ""))
    assert conversation.responses == ((3, 5),)


def test_a_line_without_an_id_has_its_number(tmp_path: Path) -> None:
    line = {"messages": [message("assistant", "a")]}
    assert [c.id for c in read(write(tmp_path / "r", {"id": "c"} | line, line, line))] == ["c", "2", "3"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "expected a JSON object, got text that is none"),
        ([], "expected an object with id and messages, got list"),
        ({"id": "c"}, "messages: expected a value, got nothing"),
        ({"id": 1, "messages": []}, "id: expected text, got 1"),
        ({"id": "c", "messages": {}}, "messages: expected a list, got dict"),
        ({"id": "c", "mesages": []}, "mesages: unknown field (did you mean 'messages'?)"),
        ({"id": "c", "messages": ["hi"]}, "messages[0]: expected an object with role and content, got str"),
        ({"id": "c", "messages": [{"role": "user"}]}, "messages[0]: content: expected a value, got nothing"),
        ({"id": "c", "messages": [message("user", "x"), {"role": None, "content": ""}]}, "messages[1].role: expected"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, text: str) -> None:
    good = {"id": "c", "messages": [message("assistant", "a")]}
    path = write(tmp_path / "r.jsonl", good, line)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}, line 2: ")
    assert text in caught.value.message


def test_a_recording_needs_a_response(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least one assistant message"):
        read(write(tmp_path / "r", {"id": "c", "messages": [message("user", "a")]}))
    with pytest.raises(ConfigError, match=r"file: expected a readable file, got .*missing"):
        read(tmp_path / "missing")


def test_words_are_cut_at_six_letters_and_numbered_as_they_come() -> None:
    encoder = WordEncoder()
    assert encoder.encode("decoding is decoding!") == [1, 2, 3, 4, 2, 5]
    assert encoder.encode(" is\n  x_1") == [3, 6, 7, 8, 9, 10]
    assert encoder.encode("\nabcdefg\n") == [6, 11, 12, 6]
    assert encoder.encode("abcdef") == [11]


def test_a_checkpoints_tokenizer_takes_control_tokens_as_text() -> None:
    encoder = load_encoder("demo")
    assert encoder.end_token_id not in encoder.encode("x <|im_end|> y")
    assert len(encoder.encode("def f(x):")) > 3
