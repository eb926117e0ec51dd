"""`bench edits`: recordings that `replay` reads, with the changes they promise."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.edits import EDITS, make_edits
from fastdeploy_sd.cli.replay.encoding import WordEncoder
from fastdeploy_sd.cli.replay.recording import read_recording

COUNT = 5


def texts(kind: str, seed: int = 0) -> list[tuple[str, str, str]]:
    """The instruction, the piece and the answer of every conversation."""
    found = []
    for conversation in make_edits(kind, COUNT, seed):
        messages = conversation["messages"]
        assert isinstance(messages, list)
        instruction, piece = messages[0]["content"].split("\n", 1)
        found.append((instruction, piece, messages[1]["content"]))
    return found


def test_a_rename_changes_one_name_everywhere() -> None:
    for instruction, piece, answer in texts("renames"):
        match = re.fullmatch(r"Rename (\w+) to (\w+):", instruction)
        assert match is not None
        old, new = match.groups()
        assert len(re.findall(rf"\b{old}\b", piece)) >= 4
        assert not re.search(rf"\b{old}\b", answer)
        assert re.sub(rf"\b{old}\b", new, piece) == answer


def test_a_correction_changes_few_words() -> None:
    for _, piece, answer in texts("corrections"):
        wrong, right = (re.findall(r"[A-Za-z_]\w{2,}", text) for text in (piece, answer))
        assert len(wrong) == len(right)
        num_changed = sum(a != b for a, b in zip(wrong, right, strict=True))
        assert len(right) / 48 <= num_changed <= len(right) / 24 + 1
        assert difflib.SequenceMatcher(None, piece.split(), answer.split()).ratio() > 0.8


@pytest.mark.parametrize("kind", EDITS)
def test_a_seed_gives_the_same_texts(kind: str) -> None:
    assert texts(kind, 3) == texts(kind, 3) != texts(kind, 4)


def test_replay_reads_the_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edits", "--count", "2", "--out", str(tmp_path / "new")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.stem for path in paths] == list(EDITS)
    for path in paths:
        assert [len(c.responses) for c in read_recording(path, WordEncoder())] == [1, 1]
