"""Outputs carried over a restart, and files that must be refused."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.methods.suffix import SuffixProposer
from fastdeploy_sd.spec_decode.methods.suffix_drafter import SuffixDrafter, SuffixLimits, SuffixRule, SuffixSequences
from fastdeploy_sd.spec_decode.methods.suffix_file import load_sequences, save_sequences
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, ProposerContext

VOCAB = 1000
PHRASE = list(range(10, 30))
OTHER = list(range(110, 130))
NUM_TOKENS = 2 * (1 + len(PHRASE))  # each behind a prompt of one token
HEADER_BYTES = 32
PAYLOAD_START = 64
OFFSETS_START = PAYLOAD_START + 2 * 16
TOKENS_START = OFFSETS_START + 3 * 8


def make(path: Path, vocab_size: int = VOCAB, max_cached_requests: int = 100) -> SuffixProposer:
    config = SpeculativeConfig(
        method="suffix",
        suffix_decoding_cache_file=str(path),
        suffix_decoding_max_cached_requests=max_cached_requests,
    )
    return SuffixProposer(config, ProposerContext(2, 64, vocab_size))


def draft(proposer: SuffixProposer, tokens: list[int], num_prompt_tokens: int, salt: str = "") -> list[int]:
    """A request of one step: drafts after `tokens`, of which the output is shared."""
    table = np.zeros((2, 64), np.int32)
    table[0, : len(tokens)] = tokens
    proposer.begin([DraftRequest("a", 0, num_prompt_tokens, num_prompt_tokens, cache_salt=salt)])
    length, budget, table_row = (np.array([n], np.int32) for n in (len(tokens), 5, 0))
    return proposer.propose(ProposeInput(("a",), table_row, table, length, budget)).token_ids.tolist()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with two outputs of different salts."""
    path = tmp_path / "suffix.cache"
    proposer = make(path)
    draft(proposer, [1, *PHRASE], 1, salt="secret tenant")
    draft(proposer, [2, *OTHER], 1)
    proposer.close()
    return path


def test_a_restarted_server_drafts_the_same(saved: Path) -> None:
    proposer = make(saved)
    proposer._drafter.check_integrity()
    assert proposer.stats().num_sequences == 2
    assert draft(proposer, PHRASE[:6], 6, salt="secret tenant") == PHRASE[6:11]
    assert draft(proposer, PHRASE[:6], 6) == []
    assert draft(proposer, OTHER[:6], 6) == OTHER[6:11]


def test_what_is_loaded_can_be_extended_and_saved_again(saved: Path) -> None:
    proposer = make(saved)
    draft(proposer, [3, 400, 401], 1)
    proposer.close()
    assert make(saved).stats().num_tokens == NUM_TOKENS + 3


def test_a_smaller_limit_keeps_the_newest(saved: Path) -> None:
    proposer = make(saved, max_cached_requests=1)
    assert proposer.stats().num_sequences == 1
    assert draft(proposer, OTHER[:6], 6) == OTHER[6:11]


def test_salts_are_not_in_the_file(saved: Path) -> None:
    assert b"secret" not in saved.read_bytes()


def test_no_file_yet_is_an_empty_cache(tmp_path: Path) -> None:
    assert make(tmp_path / "none").stats().num_tokens == 0


def test_an_empty_cache_can_be_saved_and_loaded(tmp_path: Path) -> None:
    make(tmp_path / "empty").close()
    assert make(tmp_path / "empty").stats().num_tokens == 0


def test_closing_twice_saves_once(saved: Path) -> None:
    proposer = make(saved)
    proposer.close()
    saved.unlink()
    proposer.close()
    assert not saved.exists()


@pytest.mark.parametrize("place", ["missing/suffix.cache", "file/suffix.cache"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"suffix_decoding_cache_file: .*expected a folder that can be written"):
        make(tmp_path / place)


def test_a_file_without_a_cache_is_refused_and_kept(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(ConfigError, match=r"suffix_decoding_cache_file: .*expected no file where the limits let no"):
        make(saved, max_cached_requests=0)
    assert saved.read_bytes() == before


def test_a_folder_that_is_gone_at_the_end_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").mkdir()
    proposer = make(tmp_path / "folder" / "suffix.cache")
    (tmp_path / "folder").rmdir()
    with caplog.at_level(logging.ERROR):
        proposer.close()
    assert "suffix_decoding_cache_file: expected to write" in caplog.text


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_sequences(saved, load_sequences(saved, VOCAB), VOCAB)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def set_bytes(data: bytearray, at: int, value: bytes) -> None:
    data[at : at + len(value)] = value


def seal(data: bytearray) -> None:
    """What an attacker does after changing a file: make its checksum right."""
    content = bytes(data[:HEADER_BYTES] + data[PAYLOAD_START:])
    set_bytes(data, HEADER_BYTES, hashlib.blake2b(content, digest_size=32).digest())


Change = Callable[[bytearray], None]
DAMAGE: dict[str, tuple[Change, str]] = {
    "a bit": (lambda d: set_bytes(d, TOKENS_START, b"\x7f"), "expected the checksum"),
    "a bit of the header": (lambda d: set_bytes(d, 12, b"\x7f"), "expected the checksum"),
    "cut short": (lambda d: d.__delitem__(slice(-4, None)), "expected 288 bytes, got 284"),
    "too long": (lambda d: d.extend(b"1234"), "expected 288 bytes, got 292"),
    "a stub": (lambda d: d.__delitem__(slice(20, None)), "expected a suffix cache file"),
    "empty": (lambda d: d.clear(), "expected a suffix cache file"),
    "another kind": (lambda d: set_bytes(d, 0, b"SAFETENS"), "expected a suffix cache file"),
    "a later version": (lambda d: set_bytes(d, 8, struct.pack("<I", 2)), "expected version 1, got 2"),
    "a count that overflows": (lambda d: set_bytes(d, 24, struct.pack("<Q", 1 << 62)), "bytes, got 288"),
}
CRAFTED: dict[str, tuple[Change, str]] = {
    "offsets that go back": (
        lambda d: set_bytes(d, OFFSETS_START + 8, struct.pack("<q", NUM_TOKENS + 1)),
        "expected offsets",
    ),
    "a negative offset": (lambda d: set_bytes(d, OFFSETS_START + 8, struct.pack("<q", -1)), "expected offsets"),
    "a start behind 0": (lambda d: set_bytes(d, OFFSETS_START, struct.pack("<q", 1)), "expected offsets"),
    "an end too far": (lambda d: set_bytes(d, OFFSETS_START + 16, struct.pack("<q", 1 << 40)), "expected offsets"),
    "a negative token": (lambda d: set_bytes(d, TOKENS_START, struct.pack("<i", -1)), "expected tokens from 0 to 999"),
    "a token too large": (lambda d: set_bytes(d, TOKENS_START, struct.pack("<i", VOCAB)), "expected tokens"),
}


@pytest.mark.parametrize("name", [*DAMAGE, *CRAFTED])
def test_a_file_that_is_wrong_is_refused(saved: Path, name: str) -> None:
    change, message = (DAMAGE | CRAFTED)[name]
    data = bytearray(saved.read_bytes())
    assert len(data) == TOKENS_START + NUM_TOKENS * 4
    change(data)
    if name in CRAFTED:
        seal(data)
    saved.write_bytes(data)
    with pytest.raises(ConfigError, match=f"suffix_decoding_cache_file: .*{message}"):
        make(saved)


def test_a_file_of_another_vocabulary_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="expected the model's vocab_size 500, got 1000"):
        make(saved, vocab_size=500)


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a readable file"):
        make(tmp_path)


def test_a_fifo_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="expected a readable file: expected a regular file, got a FIFO"):
        load_sequences(tmp_path / "fifo", VOCAB)


@pytest.mark.parametrize("change", ["offsets", "tokens"])
def test_the_library_checks_again(saved: Path, change: str) -> None:
    good = load_sequences(saved, VOCAB)
    offsets, tokens = good.cu_tokens.copy(), good.token_ids.copy()
    if change == "offsets":
        offsets[1] = 1 << 40
    else:
        tokens[3] = VOCAB
    drafter = SuffixDrafter(1, VOCAB, SuffixRule(), SuffixLimits(-1, 1 << 20))
    with pytest.raises(ValueError, match=r"suffix_import: (cu_tokens|token ids): expected"):
        drafter.import_sequences(SuffixSequences(good.salt_digests, offsets, tokens))
    assert drafter.stats().num_tokens == 0
