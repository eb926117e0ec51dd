"""Writes the tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = _CASED.replace("%s", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}|" + _CASED_REST
_TEKKEN = _CASED.replace("%s", "") + r"\p{N}|" + _CASED_REST
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


@dataclass(frozen=True, slots=True)
class _Words:
    """How text is cut into words before their bytes are merged.

    Attributes:
        patterns: regular expressions, applied one after the other.
        gpt2: the words of GPT-2 are cut last.
        digits: each digit is a word.
        whole_words: a word that is a token stays one, whatever the merges say.
        normalizer: of the text.
        bos: a text begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    whole_words: bool = False
    normalizer: str | None = None
    bos: bool = False


_GPT2_WORDS, _DIGITS_WORDS = _Words(gpt2=True), _Words(gpt2=True, digits=True)
# By `tokenizer.ggml.pre`. Source: the released tokenizer.json files; llama.cpp's src/llama-vocab.cpp for the names.
_WORDS: Mapping[str, _Words] = {
    "llama-bpe": _Words((_LLAMA3,), whole_words=True, bos=True),
    "llama3": _Words((_LLAMA3,), whole_words=True, bos=True),
    "smaug-bpe": _Words((_LLAMA3,)),
    "dbrx": _Words((_LLAMA3,)),
    "glm4": _Words((_LLAMA3,)),
    "chatglm-bpe": _Words((_LLAMA3,)),
    "qwen2": _Words((_QWEN2,), normalizer="NFC"),
    "deepseek-r1-qwen": _Words((_QWEN2,), normalizer="NFC"),
    "megrez": _Words((_QWEN2,), normalizer="NFC"),
    "stablelm2": _Words((_QWEN2,)),
    "qwen35": _Words((_QWEN35,), normalizer="NFC"),
    "gpt-4o": _Words((_GPT4O,)),
    "llama4": _Words((_GPT4O,)),
    "tekken": _Words((_TEKKEN,), whole_words=True, bos=True),
    "deepseek-v3": _Words(_DEEPSEEK3, bos=True),
    "hunyuan-dense": _Words(_DEEPSEEK3),
    "gpt-2": _GPT2_WORDS,
    "default": _GPT2_WORDS,
    "olmo": _GPT2_WORDS,
    "mpt": _GPT2_WORDS,
    "exaone4": _GPT2_WORDS,
    "smollm": _DIGITS_WORDS,
    "starcoder": _DIGITS_WORDS,
    "refact": _DIGITS_WORDS,
    "command-r": _DIGITS_WORDS,
    "codeshell": _DIGITS_WORDS,
    "exaone": _DIGITS_WORDS,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        where: begins every error.
        values: the file's metadata.
        tokens: text of each id, as the file spells it.
        types: of each token.
    """

    where: str
    values: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, where: str, values: Mapping[str, Any]) -> Vocabulary:
        """Read the tokens; raises CheckpointError where they are no list of different texts with types."""
        tokens = values.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens: expected a list of texts, got {shown(tokens)}")
        types = values.get("tokenizer.ggml.token_type", [1] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens) or not all(isinstance(kind, int) for kind in types):
            raise CheckpointError(f"{where}: tokenizer.ggml.token_type: expected {len(tokens)} integers, got others")
        if len(set(tokens)) != len(tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens: expected different texts, got one of them twice")
        return cls(where, values, tokens, types)

    def token_id(self, role: str) -> int | None:
        """Return the id of a role such as "bos", None where there is none."""
        value = self.values.get(f"tokenizer.ggml.{role}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            expected = f"an id below {len(self.tokens)}"
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{role}_token_id: expected {expected}, got {shown(value)}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a switch of the tokenizer."""
        value = self.values.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{name}: expected true or false, got {shown(value)}")
        return value


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return tokenizer.json.

    Raises:
        CheckpointError: neither byte pairs (`gpt2`) nor SentencePiece (`llama`), unknown words, no merges or scores.
    """
    kind = vocabulary.values.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        expected = " or ".join(_KINDS)
        raise CheckpointError(f"{vocabulary.where}: tokenizer.ggml.model: expected {expected}, got {shown(kind)}")
    return {"version": "1.0", "truncation": None, "padding": None, **_KINDS[kind](vocabulary)}


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return tokenizer_config.json, without the chat template."""
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: vocabulary.token_id(role) for name, role in roles.items()}
    return {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}


def _byte_pairs(vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.values.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _WORDS:
        expected = f"one of {', '.join(_WORDS)}"
        raise CheckpointError(f"{vocabulary.where}: tokenizer.ggml.pre: expected {expected}, got {shown(name)}")
    words = _WORDS[name]
    merges = vocabulary.values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise CheckpointError(
            f"{vocabulary.where}: tokenizer.ggml.merges: expected a list of texts, got {shown(merges)}"
        )
    steps = [_split(pattern) for pattern in words.patterns]
    steps += [{"type": "Digits", "individual_digits": True}] * words.digits
    steps.append(_byte_level(words.gpt2))
    # A merge's own space is the one that has something on both sides of it.
    pairs = [list(merge.partition(" ")[::2]) if merge[:1] != " " else ["", merge] for merge in merges]
    return {
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _template(vocabulary, words.bos),
        "decoder": _byte_level(False),
        "model": _model(vocabulary, pairs, ignore_merges=words.whole_words),
    }


def _sentence_pieces(vocabulary: Vocabulary) -> dict[str, Any]:
    # The converter of Gemma's files writes spaces in tokens that are found first.
    tokens = [
        token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    vocabulary = replace(vocabulary, tokens=tokens)
    has_prefix = vocabulary.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = spaces
    if has_prefix:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token_id("unknown")
    return {
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            vocabulary,
            _merges_of_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        ),
    }


def _merges_of_scores(vocabulary: Vocabulary) -> list[list[str]]:
    """SentencePiece merges the two neighbours whose joint piece has the best score: all such pairs, the best first."""
    scores = vocabulary.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        expected = f"{len(vocabulary.tokens)} numbers"
        raise CheckpointError(f"{vocabulary.where}: tokenizer.ggml.scores: expected {expected}, got others")
    skipped = (_UNKNOWN, _CONTROL, _BYTE)
    pieces = {t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind not in skipped}
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [
        [piece[:cut], piece[cut:]]
        for piece in (vocabulary.tokens[i] for i in order)
        if piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that a text is searched for before anything else; control tokens are special.

    Those with spaces are searched for once spaces are written as in the vocabulary.
    """
    added = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": kind == _USER_DEFINED and _SPACE in token,
            "special": kind != _USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in added
    ]


def _template(vocabulary: Vocabulary, default_bos: bool) -> dict[str, Any] | None:
    """Return what is added around a text, None for nothing."""
    wanted = {"bos": vocabulary.flag("add_bos_token", default_bos), "eos": vocabulary.flag("add_eos_token", False)}
    ids = {role: i for role, is_wanted in wanted.items() if is_wanted and (i := vocabulary.token_id(role)) is not None}
    if not ids:
        return None
    around = {role: {"SpecialToken": {"id": vocabulary.tokens[i], "type_id": 0}} for role, i in ids.items()}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [part for part in (around.get("bos"), text, around.get("eos")) if part is not None]
    specials = {(token := vocabulary.tokens[i]): {"id": token, "ids": [i], "tokens": [token]} for i in ids.values()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}


def _model(vocabulary: Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges, **options}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


_KINDS: Mapping[str, Callable[[Vocabulary], dict[str, Any]]] = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
