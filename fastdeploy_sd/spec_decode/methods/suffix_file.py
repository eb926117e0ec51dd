"""The file that keeps outputs to draft from over a restart.

Little-endian throughout: magic, u32 version, u32 vocab_size, u64 Q, u64 N, a digest, then u8[Q, 16] salt digests,
i64[Q+1] offsets and i32[N] tokens of Q outputs, oldest first. The digest is blake2b of everything else. The texts are
stored, not the automata: a tenth of the bytes, no pointers to check, and the same drafts.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
from pathlib import Path
from typing import NoReturn

import numpy as np

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.process.files import read_bytes, replacing
from fastdeploy_sd.spec_decode.methods.suffix_drafter import SALT_DIGEST_BYTES, SuffixSequences

_OPTION = "suffix_decoding_cache_file"
_MAGIC = b"FDSDSUFX"
_VERSION = 1
_DIGEST_BYTES = 32
_HEADER = struct.Struct("<8sIIQQ")
_PAYLOAD_START = _HEADER.size + _DIGEST_BYTES


def verify_can_save(path: Path, *, is_cache_enabled: bool) -> None:
    """Verify at the start that the cache can be saved at the end; raises ConfigError."""
    if not is_cache_enabled:
        _fail(path, "expected no file where the limits let no output be kept, got one")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        _fail(path, f"expected a folder that can be written: {error}")


def save_sequences(path: Path, sequences: SuffixSequences, vocab_size: int) -> None:
    """Write the file in place of the old one, as `files.replacing` does."""
    header = _HEADER.pack(_MAGIC, _VERSION, vocab_size, len(sequences.salt_digests), len(sequences.token_ids))
    payload = (
        sequences.salt_digests.astype("u1", copy=False).tobytes(),
        sequences.cu_tokens.astype("<i8", copy=False).tobytes(),
        sequences.token_ids.astype("<i4", copy=False).tobytes(),
    )
    with replacing(path) as file:
        file.writelines((header, _digest(header, *payload), *payload))


def load_sequences(path: Path, vocab_size: int) -> SuffixSequences:
    """Read a saved file; raises ConfigError for one that is unreadable, damaged, or of another vocabulary."""
    try:
        data = read_bytes(path)
    except OSError as error:
        _fail(path, f"expected a readable file: {error}")
    if len(data) < _PAYLOAD_START or data[: len(_MAGIC)] != _MAGIC:
        _fail(path, "expected a suffix cache file, got another kind")
    _, version, file_vocab_size, num_sequences, num_tokens = _HEADER.unpack_from(data)
    if version != _VERSION:
        _fail(path, f"expected version {_VERSION}, got {version}")
    # Python integers: counts that would overflow are compared exactly.
    sizes = (num_sequences * SALT_DIGEST_BYTES, (num_sequences + 1) * 8, num_tokens * 4)
    if len(data) != _PAYLOAD_START + sum(sizes):
        _fail(path, f"expected {_PAYLOAD_START + sum(sizes)} bytes, got {len(data)}")
    if _digest(data[: _HEADER.size], memoryview(data)[_PAYLOAD_START:]) != data[_HEADER.size : _PAYLOAD_START]:
        _fail(path, "expected the checksum of its content, got another; the file is damaged")
    if file_vocab_size != vocab_size:
        _fail(path, f"expected the model's vocab_size {vocab_size}, got {file_vocab_size}; it is another model's file")
    cu_tokens_start = _PAYLOAD_START + sizes[0]
    sequences = SuffixSequences(
        np.frombuffer(data, "u1", sizes[0], _PAYLOAD_START).reshape(num_sequences, SALT_DIGEST_BYTES),
        np.frombuffer(data, "<i8", num_sequences + 1, cu_tokens_start).astype(np.int64),
        np.frombuffer(data, "<i4", num_tokens, cu_tokens_start + sizes[1]).astype(np.int32),
    )
    _verify(path, sequences, vocab_size)
    return sequences


def _verify(path: Path, sequences: SuffixSequences, vocab_size: int) -> None:
    cu_tokens, token_ids = sequences.cu_tokens, sequences.token_ids
    if cu_tokens[0] != 0 or cu_tokens[-1] != len(token_ids) or (cu_tokens[1:] < cu_tokens[:-1]).any():
        _fail(path, "expected offsets that rise from 0 to the number of tokens, got others")
    if ((token_ids < 0) | (token_ids >= vocab_size)).any():
        _fail(path, f"expected tokens from 0 to {vocab_size - 1}, got one outside")


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _fail(path: Path, what: str) -> NoReturn:
    raise ConfigError(f"{_OPTION}: {path}: {what}", param=_OPTION)
