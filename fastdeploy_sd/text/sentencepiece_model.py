"""Reads a tokenizer.model: the SentencePiece library's file, checked, and what it says piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as proto

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.process.files import describe, read_bytes
from fastdeploy_sd.text.token_bytes import BYTE_PIECES

MAX_BYTES = 1 << 26  # the largest released ones have 5 MB
SPACE = "\u2581"  # SentencePiece's spelling of a space

Piece: Any = proto.ModelProto.SentencePiece  # type: ignore[attr-defined]


class SentencePieceModel:
    """One SentencePiece model, with and without (`encode_inner`) the space that it puts before a text.

    Raises:
        CheckpointError: the file is missing, malformed, or rewrites what it decodes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model = _read(path)
        self.pieces: list[str] = [piece.piece for piece in self._model.pieces]
        self.adds_space: bool = self._model.normalizer_spec.add_dummy_prefix
        self.encode = self._encoder(self.adds_space)
        self.encode_inner = self._encoder(False)

    def _encoder(self, adds_space: bool) -> Callable[[str], list[int]]:
        self._model.normalizer_spec.add_dummy_prefix = adds_space
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(self._model.SerializeToString())
        except Exception as error:  # the library raises whatever its parts do
            raise CheckpointError(f"{self._path}: expected a SentencePiece model, got {describe(error)}") from None
        encode: Callable[[str], list[int]] = processor.encode
        return encode

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of pieces that stand for no text: BOS, padding, the unknown one."""
        return frozenset(i for i, p in enumerate(self._model.pieces) if p.type in (Piece.CONTROL, Piece.UNKNOWN))

    @cached_property
    def unknown_ids(self) -> frozenset[int]:
        """The id that stands for any text without another."""
        return frozenset(i for i, p in enumerate(self._model.pieces) if p.type == Piece.UNKNOWN)

    @cached_property
    def user_defined(self) -> dict[str, int]:
        """Text -> id of the pieces that are found in a text before any other."""
        return {p.piece: i for i, p in enumerate(self._model.pieces) if p.type == Piece.USER_DEFINED}

    @cached_property
    def bytes_of_pieces(self) -> list[bytes]:
        """What each id adds to a text; control pieces, which add none, are shown by their name."""
        return [_bytes_of(piece) for piece in self._model.pieces]

    @cached_property
    def max_piece_chars(self) -> int | None:
        """No piece stands for more characters of a text; None where the normalizer may drop or join characters."""
        spec = self._model.normalizer_spec
        if spec.precompiled_charsmap or spec.remove_extra_whitespaces:
            return None
        byte_pieces = {p.piece for p in self._model.pieces if p.type == Piece.BYTE}
        return max(map(len, self.pieces)) if byte_pieces >= BYTE_PIECES else None


def _read(path: Path) -> Any:
    try:
        model = proto.ModelProto.FromString(read_bytes(path, MAX_BYTES))  # type: ignore[attr-defined]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a tokenizer.model, found none") from None
    except (OSError, DecodeError) as error:
        raise CheckpointError(f"{path}: expected a SentencePiece model: {describe(error)}") from None
    if not model.pieces:
        raise CheckpointError(f"{path}: expected a SentencePiece model with pieces, got none")
    if model.denormalizer_spec.precompiled_charsmap:
        raise CheckpointError(f"{path}: expected a model without a denormalizer, got one")
    return model


def _bytes_of(piece: Any) -> bytes:
    text: str = piece.piece
    if piece.type == Piece.BYTE and text in BYTE_PIECES:
        return bytes([int(text[3:5], 16)])
    return text.encode() if piece.type in (Piece.CONTROL, Piece.UNKNOWN) else text.replace(SPACE, " ").encode()
