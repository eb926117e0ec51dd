"""Tokenizers for tests: the golden checkpoints' byte-level one, and small ones of other kinds built here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from fastdeploy_sd.text.fast_tokenizer import FastTokenizer

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "qwen3-tiny"
# As gpt-oss's: what was thought has a name of its own, and a turn has one call.
CHANNEL_TEMPLATE = """{%- set ns = namespace(last='') %}
{%- if tools %}<|start|>developer<|message|>
{%- for tool in tools %}{%- set tool = tool.function %}{{- '// ' + tool.description + ' type ' + tool.name + ';' }}
{%- endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}{%- set ns.last = call.name %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking or '') + '<|end|>' }}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == 'tool' %}<|start|>functions.{{ ns.last }} to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}{{ reasoning_effort }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def golden_tokenizer() -> FastTokenizer:
    """Byte-level BPE with four control tokens."""
    return FastTokenizer(GOLDEN)


def thinking_tokenizer(directory: Path, *, is_special: bool) -> FastTokenizer:
    """The golden one with tokens for <think> and </think>, which texts show or not."""
    return added_tokenizer(directory, ("<think>", "</think>"), is_special=is_special)


def added_tokenizer(directory: Path, texts: Sequence[str], *, is_special: bool = False) -> FastTokenizer:
    """The golden one with further tokens, flagged special or not."""
    spec = json.loads((GOLDEN / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": is_special}
    num_tokens = len(spec["model"]["vocab"])
    spec["added_tokens"] += [{"id": num_tokens + i, "content": text, **flags} for i, text in enumerate(texts)]
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return FastTokenizer(directory)


def byte_fallback_tokenizer(directory: Path) -> FastTokenizer:
    """SentencePiece-like: word-border pieces, single characters, and the 256 byte pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdefghijk", "\u2581ab", "ab"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("a", "b"), ("\u2581", "ab")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _written(tokenizer, directory, {"bos_token": "<s>", "eos_token": "</s>"})


def word_tokenizer(directory: Path) -> FastTokenizer:
    """WordPiece, whose text of a token depends on its neighbours; `<|user|>` is a turn marker not flagged special."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##s", "##ing", "go", "e", "a", "<", ">", "|", "user"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.add_tokens(["<|user|>", "<think>"])
    return _written(tokenizer, directory, {"eos_token": "[SEP]"})


def _written(tokenizer: tokenizers.Tokenizer, directory: Path, config: dict[str, str]) -> FastTokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return FastTokenizer(directory)


SENTENCEPIECE = GOLDEN.parent / "sentencepiece"


def sentencepiece_files(directory: Path, model: str, **files: object) -> Path:
    """Write a checkpoint's tokenizer with a golden model; a file is named without its .json."""
    shutil.copy(SENTENCEPIECE / f"{model}.model", directory / "tokenizer.model")
    for name, content in files.items():
        (directory / f"{name.removesuffix('.json')}.json").write_text(json.dumps(content))
    return directory
