"""The Tokenizer interface on a SentencePiece model (tokenizer.model), for checkpoints without a tokenizer.json.

Ids are those of the class that the checkpoint names: ERNIE 4.5's own, or transformers' (slow) Llama tokenizer, `legacy`
or not. They differ in the space before a text and in BOS. Any other class is refused: its rules are unknown here.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as proto

from fastdeploy_sd.errors import CheckpointError, suggest
from fastdeploy_sd.process.files import describe, read_bytes
from fastdeploy_sd.text.added_tokens import AddedToken, Segment, apply_borders, cut, encode_spelled_out, token_pattern
from fastdeploy_sd.text.token_bytes import BYTE_PIECES
from fastdeploy_sd.text.tokenizer_files import TokenizerFiles, read_tokenizer_files

MAX_BYTES = 1 << 26  # the largest released ones have 5 MB
SPACE = "\u2581"  # SentencePiece's spelling of a space

Piece: Any = proto.ModelProto.SentencePiece  # type: ignore[attr-defined]


class SentencePieceModel:
    """One model, with and without (`encode_inner`) the space that it puts before a text. Raises CheckpointError."""

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


_ERNIE = frozenset({"Ernie4_5Tokenizer", "Ernie4_5_Tokenizer"})
_DEFAULT_TOKENS = frozenset({"<s>", "</s>", "<unk>"})
_LLAMA = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a class does besides calling the library, which puts its space before each stretch only if `is_legacy`.

    With `adds_space`, one space comes before the whole text where the library puts none.
    """

    adds_bos: bool
    adds_eos: bool
    is_legacy: bool
    adds_space: bool


def model_path(directory: Path) -> Path | None:
    """Return the SentencePiece model of a checkpoint, None where there is none; PaddleNLP's has the second name."""
    paths = (directory / name for name in ("tokenizer.model", "sentencepiece.bpe.model"))
    return next((path for path in paths if os.path.lexists(path)), None)


class SentencePieceTokenizer:
    """A tokenizer.model with the tokens added to it; see Tokenizer. Raises CheckpointError."""

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        self.files = read_tokenizer_files(directory, chat_template)
        self._rules = _rules_of(directory / "tokenizer_config.json", self.files)
        self._model = SentencePieceModel(model_path(directory) or directory / "tokenizer.model")
        self._added = _with_ids(self.files, self._model.pieces)
        self._named = self.files.named_tokens | _DEFAULT_TOKENS
        markers = {text: AddedToken(text, i) for text, i in self._model.user_defined.items()}
        controls = {text: t for text, t in (markers | self._added).items() if t.is_control}
        self.control_tokens = {text: _id_of(token) for text, token in controls.items()}
        self.hidden_ids = self._model.control_ids | {_id_of(t) for t in self._added.values() if t.special}
        self._control_ids = frozenset(self.control_tokens.values()) - self._model.unknown_ids  # any text may have those
        self._any_added = token_pattern(self._added)
        self._plain_added = token_pattern(self._added.keys() - controls.keys())
        self._any_control = token_pattern(controls)
        self._tokens = controls | self._added
        self._bytes = dict(enumerate(self._model.bytes_of_pieces))
        self._bytes |= {_id_of(token): token.content.encode() for token in self._added.values()}
        self._guard = self.files.special_tokens.get("unk_token", "<unk>")
        self._guard_length = len(self._model.encode_inner(self._guard))

    @property
    def num_ids(self) -> int:
        return max(self._bytes, default=-1) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.files.eos_token_ids or tuple(self._role("eos_token", "</s>"))

    @property
    def max_token_chars(self) -> int | None:
        piece = self._model.max_piece_chars
        if piece is None or any(token.lstrip or token.rstrip for token in self._added.values()):
            return None
        return max([piece, *map(len, self._added)])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not self._rules.is_legacy and text:
            text = (SPACE if self._rules.adds_space else "") + text.replace(SPACE, " ")
        token_ids = self._encode_parts([Segment(*part) for part in cut(self._any_added, text)])
        if not add_special_tokens:
            return token_ids
        bos = self._role("bos_token", "<s>") if self._rules.adds_bos else []
        eos = self._role("eos_token", "</s>") if self._rules.adds_eos else []
        return [*bos, *token_ids, *eos]

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        parts = list(segments)
        if not self._rules.is_legacy and parts:
            parts = [part if part.is_control else replace(part, text=part.text.replace(SPACE, " ")) for part in parts]
            if self._rules.adds_space and parts[0].is_control:
                parts = [Segment(SPACE, is_control=False), *parts]
            elif self._rules.adds_space:
                parts[0] = replace(parts[0], text=SPACE + parts[0].text)
        return self._encode_parts([piece for part in parts for piece in self._cut_plain(part)], is_plain=True)

    def _cut_plain(self, part: Segment) -> Iterable[Segment]:
        """Tokens that do not steer the model are found in text too."""
        return [part] if part.is_control else [Segment(*piece) for piece in cut(self._plain_added, part.text)]

    def _encode_parts(self, parts: Sequence[Segment], *, is_plain: bool = False) -> list[int]:
        token_ids: list[int] = []
        found = self._added.keys() - self.control_tokens.keys() if is_plain else self._added.keys()
        parts = [Segment(p.text, p.is_control or p.text in found) for p in apply_borders(parts, self._tokens)]
        for i, part in enumerate(parts):
            if not self._is_added(part):
                # A marker of the model's own is part of the stretch around it, in which only the start gets a space.
                is_start = i == 0 or self._is_added(parts[i - 1]) or not (part.is_control or parts[i - 1].is_control)
                token_ids += self._encode_stretch(part, is_start, is_plain and not part.is_control)
                continue
            if i == 1 and parts[0].text in (SPACE, " ") and part.text in self._named and not self._rules.is_legacy:
                token_ids.clear()  # a space before a text is left out when a special token comes next
            token_ids.append(_id_of(self._added[part.text]))
        return token_ids

    def _is_added(self, part: Segment) -> bool:
        return part.is_control and part.text in self._added

    def _encode_stretch(self, part: Segment, is_start: bool, is_plain: bool) -> list[int]:
        token_ids = self._encode_text(part.text, is_start)
        if not is_plain or self._control_ids.isdisjoint(token_ids):
            return token_ids

        def encode(text: str) -> list[int] | None:
            found = self._encode_text(text, is_start=False)
            return found if self._control_ids.isdisjoint(found) else None

        return encode_spelled_out(part.text, self._any_control, encode)

    def _encode_text(self, text: str, is_start: bool) -> list[int]:
        if self._rules.is_legacy and is_start:
            return self._model.encode(text)
        if not text.startswith((SPACE, " ")):
            return self._model.encode_inner(text)
        # The library drops a leading space that it has not put there itself; after other text it keeps it.
        token_ids = self._model.encode_inner(self._guard + text)
        return token_ids[self._guard_length :] if len(token_ids) >= self._guard_length else token_ids

    def decode(self, token_ids: Sequence[int], *, skip_hidden: bool) -> str:
        shown = [i for i in token_ids if not (skip_hidden and i in self.hidden_ids)]
        data = b"".join(self.token_bytes(i) for i in shown)
        adds_space = self._model.adds_space if self._rules.is_legacy else self._rules.adds_space
        if adds_space and shown and data.startswith(b" ") and self._is_piece(shown[0]):
            data = data[1:]  # the space that encoding has put before the text
        return codecs.decode(data, "utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def _is_piece(self, token_id: int) -> bool:
        return 0 <= token_id < len(self._model.pieces) and self._model.pieces[token_id].startswith(SPACE)

    def _role(self, name: str, default: str) -> list[int]:
        text = self.files.special_tokens.get(name, default)
        if text in self._added:
            return [_id_of(self._added[text])]
        return [self._model.pieces.index(text)] if text in self._model.pieces else []


def _rules_of(path: Path, files: TokenizerFiles) -> _Rules:
    """Return the rules of the class that the files name; without a name the kind of model decides."""
    name = files.tokenizer_class
    is_ernie = name in _ERNIE or (name is None and (files.model_type or "").startswith("ernie"))
    if name is not None and name not in _ERNIE | _LLAMA:
        known = sorted(_ERNIE | _LLAMA)
        raise CheckpointError(
            f"{path}: tokenizer_class: expected one of {', '.join(known)} with a tokenizer.model and no"
            f" tokenizer.json, got {name!r:.100}{suggest(name, known)}"
        )
    switches = files.switches
    if switches.get("split_special_tokens"):
        raise CheckpointError(f"{path}: split_special_tokens: expected false, got true")
    if is_ernie:
        return _Rules(adds_bos=False, adds_eos=False, is_legacy=True, adds_space=False)
    is_legacy = switches.get("legacy", True)
    return _Rules(
        adds_bos=switches.get("add_bos_token", True),
        adds_eos=switches.get("add_eos_token", False),
        is_legacy=is_legacy,
        adds_space=not is_legacy and switches.get("add_prefix_space", True),
    )


def _with_ids(files: TokenizerFiles, pieces: Sequence[str]) -> dict[str, AddedToken]:
    """Return text -> added token with its id: the listed one, the piece's, or the next after all others."""
    vocabulary = {text: i for i, text in enumerate(pieces)}
    added = {token.content: token for token in files.added_tokens if token.token_id is not None}
    vocabulary |= {text: _id_of(token) for text, token in added.items()}
    defaults = [AddedToken(text, None, special=True) for text in sorted(_DEFAULT_TOKENS) if text in vocabulary]
    for token in [*files.added_tokens, *defaults]:
        if token.content not in added:
            token_id = vocabulary.setdefault(token.content, len(vocabulary))
            added[token.content] = replace(token, token_id=token_id)
    return added


def _id_of(token: AddedToken) -> int:
    assert token.token_id is not None
    return token.token_id
