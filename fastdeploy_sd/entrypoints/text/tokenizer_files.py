"""Reads what a checkpoint's JSON files say about its tokenizer, besides tokenizer.json itself.

Knows the files' names and their historical variants; knows no tokenizer library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.files import describe, read_json, read_text

MAX_TEMPLATE_BYTES = 1 << 20
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Facts of the small files.

    Attributes:
        special_tokens: "bos_token" and so on -> its text; only those the checkpoint names.
        eos_token_ids: of generation_config.json, else config.json; empty when neither says.
        chat_template: Jinja source, None when the checkpoint has none.
    """

    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and the chat template.

    Every file is optional.

    Raises:
        CheckpointError: a file is not JSON, or a value in it has the wrong type; the text names the file.
    """
    tokenizer_config = read_json(directory / "tokenizer_config.json", missing_ok=True)
    tokens_map = read_json(directory / "special_tokens_map.json", missing_ok=True)
    special = {}
    for name in SPECIAL_TOKEN_NAMES:
        text = _token_text(tokenizer_config.get(name)) or _token_text(tokens_map.get(name))
        if text:
            special[name] = text
    eos = _eos_ids(directory / "generation_config.json") or _eos_ids(directory / "config.json")
    return TokenizerFiles(special, eos, _read_chat_template(directory, tokenizer_config))


def _token_text(value: object) -> str | None:
    """A special token is written as a string or as an object that has its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(path: Path) -> tuple[int, ...]:
    value = read_json(path, missing_ok=True).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{path}: eos_token_id: expected a token id or a list of them, got {value!r}")
    return tuple(ids)


def _read_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the key of tokenizer_config.json, else chat_template.json (its predecessor)."""
    try:
        return read_text(directory / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / 'chat_template.jinja'}: expected a text file: {describe(error)}") from None
    for source in (tokenizer_config, read_json(directory / "chat_template.json", missing_ok=True)):
        template = source.get("chat_template")
        if isinstance(template, list):  # several named ones: only "default" is for plain chat
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None
