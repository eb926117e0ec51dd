"""Writes cases.json: what transformers' slow tokenizers make of the texts. Needs transformers 4 and sentencepiece.

ERNIE 4.5's published class is the base class around plain calls of the SentencePiece library, as `_Ernie` is here.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import LlamaTokenizer, PreTrainedTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from texts import texts  # noqa: E402

COUNT = 10_000
SAMPLES = 40
# A small set of rules in place of the library's own 240 kB: full-width, ligature, circled digit, composition.
RULES = "FF21\t41\nFF22\t42\nFB01\t66 69\n2460\t31\n65 301\tE9\nFF1C\t3C\nFF1E\t3E\n9\t20\nA\t20\n3000\t20\n"
SENTENCES = [
    "hello world the foo bar def f(x): return x",
    "the world said hello to foo_bar, ABC abc.",
    "\u4f60\u597d \u4e16\u754c hello the 1234 Z\u00fcrich \u00e9 A B fi 1 < > s",
] * 50


def train(name: str, **options: Any) -> None:
    """Write one model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options
    )
    (HERE / f"{name}.model").write_bytes(model.getvalue())


def make_models() -> None:
    """Write the models: like ERNIE's, like Llama's, and one with everything different."""
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    symbols = ["<mask:1>", "<u>", "<|user|>"]
    train("bpe", model_type="bpe", vocab_size=400, add_dummy_prefix=False, user_defined_symbols=symbols, **plain)
    train("bpe-prefix", model_type="bpe", vocab_size=400, control_symbols=["<|end|>"], **plain)
    (HERE / "rules.tsv").write_text(RULES)
    train("unigram", model_type="unigram", vocab_size=120, normalization_rule_tsv=str(HERE / "rules.tsv"))
    (HERE / "rules.tsv").unlink()


class _Ernie(PreTrainedTokenizer):  # type: ignore[misc]
    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012

    def __init__(self, vocab_file: str, **options: Any) -> None:
        self._library = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return int(self._library.vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return {self._library.id_to_piece(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text: str) -> list[str]:
        return list(self._library.encode_as_pieces(text))

    def _convert_token_to_id(self, token: str) -> int:
        return int(self._library.piece_to_id(token))


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Return a token as tokenizer_config.json has it."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False} | flags
    return {"content": content} | flags


LISTED = {"<|end|>": 500, "<think>": 501, "</think>": 502}
DECODER = {
    "0": token("<unk>", special=True),
    "1": token("<s>", special=True),
    "2": token("</s>", special=True, rstrip=True),
    "500": token("<|end|>", special=True, lstrip=True),
    "501": token("<think>", single_word=True),
    "502": token("</think>", lstrip=True, rstrip=True),
}
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CASES: dict[str, dict[str, Any]] = {
    "ernie": {
        "model": "bpe",
        "tokenizer_config.json": {"tokenizer_class": "Ernie4_5_Tokenizer"},
        "special_tokens_map.json": ROLES
        | {"cls_token": "<|end|>", "mask_token": token("<mask:1>"), "additional_special_tokens": ["<|user|>", "<new>"]},
        "added_tokens.json": LISTED,
    },
    "llama": {
        "model": "bpe-prefix",
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"} | ROLES,
        "added_tokens.json": LISTED,
    },
    "llama-new": {
        "model": "bpe-prefix",
        "tokenizer_config.json": ROLES
        | {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "added_tokens_decoder": DECODER},
    },
    "llama-new-bare": {
        "model": "bpe",
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False}
        | {"add_bos_token": False, "add_eos_token": True, "pad_token": "<pad>"},
    },
    "unigram": {
        "model": "unigram",
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": DECODER} | ROLES,
    },
    "unigram-new": {
        "model": "unigram",
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False} | ROLES,
        "special_tokens_map.json": {"additional_special_tokens": [token("<|user|>", rstrip=True)]},
        "added_tokens.json": LISTED,
    },
}


def main() -> None:
    """Make the models and the cases."""
    make_models()
    made = {}
    for name, files in CASES.items():
        folder = HERE / "case"
        folder.mkdir()
        for file, content in files.items():
            if file != "model":
                (folder / file).write_text(json.dumps(content))
        (folder / "tokenizer.model").write_bytes((HERE / f"{files['model']}.model").read_bytes())
        tokenizer = (_Ernie if name == "ernie" else LlamaTokenizer).from_pretrained(str(folder))
        ids = [tokenizer.encode(text) for text in texts(COUNT)]
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        made[name] = {"files": files, "count": COUNT, "sha256": digest, "ids": ids[:SAMPLES]}
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    (HERE / "cases.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
