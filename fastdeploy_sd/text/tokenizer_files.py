"""Reads what a checkpoint's JSON files say about its tokenizer, besides tokenizer.json itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError, ConfigError
from fastdeploy_sd.process.files import describe, read_json, read_text
from fastdeploy_sd.text.added_tokens import AddedToken

MAX_TEMPLATE_BYTES = 1 << 20
# In the order in which transformers gives ids to those that have none.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_TOKEN_CHARS = 1024
_FLAGS = ("special", "lstrip", "rstrip", "single_word")
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Facts of the small files. `added_tokens` are in the order of the files, then special ones without an id.

    `eos_token_ids` are of generation_config.json, else config.json; `named_tokens` have a role or are listed as extra.
    """

    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    added_tokens: tuple[AddedToken, ...] = ()
    named_tokens: frozenset[str] = frozenset()
    tokenizer_class: str | None = None
    model_type: str | None = None
    switches: Mapping[str, bool] = field(default_factory=dict)


def read_tokenizer_files(directory: Path, chat_template: str | None = None) -> TokenizerFiles:
    """Read the small files, each of which may be missing.

    `chat_template`: see load_tokenizer. Raises CheckpointError of a malformed file, ConfigError of another template.
    """
    reader = _Reader(directory)
    special = reader.special_tokens()
    named = [*special.values(), *reader.additional_tokens()]
    eos = _eos_ids(directory / "generation_config.json") or _eos_ids(directory / "config.json")
    return TokenizerFiles(
        special_tokens={name: token.content for name, token in special.items()},
        eos_token_ids=eos,
        chat_template=_read_chat_template(directory, reader.config)
        if chat_template is None
        else _own_chat_template(chat_template),
        added_tokens=tuple(reader.added_tokens(named)),
        named_tokens=frozenset(token.content for token in named),
        tokenizer_class=_optional_text(directory / "tokenizer_config.json", reader.config, "tokenizer_class"),
        model_type=_optional_text(
            directory / "config.json", read_json(directory / "config.json", missing_ok=True), "model_type"
        ),
        switches=reader.switches(),
    )


class _Reader:
    """The files about tokens; where two of them speak, the rules of transformers say which is heard."""

    def __init__(self, directory: Path) -> None:
        self._config_path = directory / "tokenizer_config.json"
        self._map_path = directory / "special_tokens_map.json"
        self._added_path = directory / "added_tokens.json"
        self.config = read_json(self._config_path, missing_ok=True)
        self._map = read_json(self._map_path, missing_ok=True)

    def switches(self) -> dict[str, bool]:
        found = {}
        for name in _SWITCHES:
            value = self.config.get(name)
            if value is not None:
                if not isinstance(value, bool):
                    raise CheckpointError(f"{self._config_path}: {name}: expected true or false, got {value!r:.100}")
                found[name] = value
        return found

    def special_tokens(self) -> dict[str, AddedToken]:
        """Return "bos_token" and so on -> the token."""
        special: dict[str, AddedToken] = {}
        for name in SPECIAL_TOKEN_NAMES:
            for path, source in self._sources():
                if (token := _special_token(f"{path}: {name}", source.get(name))) is not None:
                    special.setdefault(name, token)
        return special

    def added_tokens(self, named: Sequence[AddedToken]) -> Iterator[AddedToken]:
        """Yield tokens with an id, then those of `named` without; raises CheckpointError where two share text or id."""
        special_texts = {token.content for token in named}
        ids: dict[str, int] = {}
        listed = list(self._decoder() if "added_tokens_decoder" in self.config else self._listed())
        for token in listed:
            assert token.token_id is not None
            if ids.setdefault(token.content, token.token_id) != token.token_id:
                raise CheckpointError(
                    f"{self._config_path}: added_tokens: expected one id of {token.content!r}, got two"
                )
        if len(set(ids.values())) != len(ids):
            raise CheckpointError(f"{self._config_path}: added_tokens: expected one text for an id, got several")
        yield from (replace(token, special=token.special or token.content in special_texts) for token in listed)
        yield from {t.content: t for t in named if t.content not in ids}.values()

    def _sources(self) -> list[tuple[Path, dict[str, Any]]]:
        """The newer form of tokenizer_config.json holds everything. With the older one the map comes first."""
        sources = [(self._map_path, self._map), (self._config_path, self.config)]
        return sources[::-1] if "added_tokens_decoder" in self.config else sources

    def additional_tokens(self) -> Iterator[AddedToken]:
        """Yield special tokens without a role; raises CheckpointError."""
        for path, source in self._sources():
            values = source.get("additional_special_tokens")
            if values is not None and not isinstance(values, list):
                raise CheckpointError(f"{path}: additional_special_tokens: expected a list, got {values!r:.100}")
            for value in values or ():
                token = _special_token(f"{path}: additional_special_tokens", value)
                if token is not None:
                    yield token

    def _decoder(self) -> Iterator[AddedToken]:
        where = f"{self._config_path}: added_tokens_decoder"
        decoder = self.config["added_tokens_decoder"]
        if not isinstance(decoder, dict):
            raise CheckpointError(f"{where}: expected a map of ids to tokens, got {decoder!r:.100}")
        for key, value in decoder.items():
            if not isinstance(value, dict):
                raise CheckpointError(f"{where}: expected objects with content, got {value!r:.100}")
            token_id = int(key) if key.isascii() and key.isdigit() and len(key) < len(str(_MAX_TOKEN_ID)) + 1 else -1
            yield _token(where, value, _token_id(where, token_id if token_id >= 0 else key))

    def _listed(self) -> Iterator[AddedToken]:
        for text, token_id in read_json(self._added_path, missing_ok=True).items():
            where = f"{self._added_path}: {text!r:.100}"
            yield AddedToken(_content(where, text), _token_id(where, token_id))


def _special_token(where: str, value: object) -> AddedToken | None:
    """A special token is written as a text or as an object that has its text in `content`; "" and null are none."""
    if value is None or value == "":
        return None
    fields = value if isinstance(value, dict) else {"content": value}
    return _token(where, {**fields, "special": True}, None)


def _token(where: str, fields: Mapping[str, Any], token_id: int | None) -> AddedToken:
    flags = {name: fields.get(name, False) for name in _FLAGS}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise CheckpointError(f"{where}: {name}: expected true or false, got {flag!r:.100}")
    return AddedToken(_content(where, fields.get("content")), token_id, **flags)


def _content(where: str, text: object) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= _MAX_TOKEN_CHARS:
        raise CheckpointError(f"{where}: expected a text of 1 to {_MAX_TOKEN_CHARS} characters, got {text!r:.100}")
    return text


def _token_id(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_TOKEN_ID:
        raise CheckpointError(f"{where}: expected a token id in 0..{_MAX_TOKEN_ID}, got {value!r:.100}")
    return value


def _optional_text(path: Path, source: Mapping[str, Any], key: str) -> str | None:
    value = source.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: {key}: expected a text, got {value!r:.100}")
    return value


def _eos_ids(path: Path) -> tuple[int, ...]:
    value = read_json(path, missing_ok=True).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_token_id(f"{path}: eos_token_id", token_id) for token_id in ids)


def _own_chat_template(given: str) -> str:
    if any(sign in given for sign in ("{{", "{%")):
        return given
    try:
        return read_text(Path(given), MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: expected a text file, or a template with {{{{ or {{%, got {given!r:.200}:"
            f" {describe(error)}",
            param="chat_template",
        ) from None


def _read_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the key of tokenizer_config.json, else chat_template.json (its predecessor)."""
    path = directory / "chat_template.jinja"
    try:
        return read_text(path, MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected a text file: {describe(error)}") from None
    old_path = directory / "chat_template.json"
    for path, source in (
        (directory / "tokenizer_config.json", tokenizer_config),
        (old_path, read_json(old_path, missing_ok=True)),
    ):
        template = source.get("chat_template")
        if isinstance(template, list):  # several named ones: only "default" is for plain chat
            named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{path}: chat_template: expected a text, got {template!r:.100}")
        if template is not None:
            return template
    return None
