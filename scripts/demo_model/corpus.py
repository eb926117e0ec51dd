"""Build the demo model's corpus and tokenizer from the running Python's standard library (PSF licence).

Usage: python scripts/demo_model/corpus.py DATA_DIR

Writes DATA_DIR/tokenizer.json (byte-level BPE, 4096 entries), train.bin and val.bin (u16 token ids) and
held_out.json (the files behind val.bin, never seen in training). Two kinds of documents are mixed: whole source
files, and chat samples whose answer overlaps the prompt (rename, repeat, complete a function), as in code editing.
"""

from __future__ import annotations

import ast
import json
import pathlib
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
NUM_HELD_OUT_FILES = 25
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
KEYWORDS = {
    "def", "self", "return", "for", "not", "and", "None", "the", "with", "try", "except", "import", "from", "else",
    "elif", "raise", "class", "pass", "while", "yield", "break", "continue", "lambda", "del", "assert", "finally",
    "global", "nonlocal", "async", "await",
}  # fmt: skip
NEW_NAMES = ["value", "item", "result", "data", "node", "name", "key", "index", "path", "count", "line", "buf", "args"]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def source_files() -> list[tuple[str, str]]:
    """Return (relative path, text) of every standard-library module worth learning from."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 400:
                found.append((str(path.relative_to(root)), text))
    return found


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train byte-level BPE; digits are single tokens, so numbers copy exactly."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def functions(text: str) -> Iterator[str]:
    """Yield the dedented source of each short function in a module."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and 4 <= node.end_lineno - node.lineno <= 28:
            source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source) < 1400:
                yield source


def chat_samples(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (user, assistant) pairs: 40 % rename, 30 % repeat, 30 % complete."""
    for source in functions(text):
        draw = rng.random()
        if draw < 0.4:
            names = sorted(set(re.findall(r"\b[a-z_]{3,12}\b", source)) - KEYWORDS)
            if names:
                old, new = rng.choice(names), rng.choice(NEW_NAMES)
                yield f"Rename `{old}` to `{new}`:\n{source}", re.sub(rf"\b{old}\b", new, source)
        elif draw < 0.7:
            yield f"Repeat this code:\n{source}", source
        else:
            lines = source.splitlines(keepends=True)
            yield "Complete this function:\n" + "".join(lines[: max(1, len(lines) // 3)]), source


class Encoder:
    """Text -> token ids; chat markers are added as ids, never parsed from text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_of_text, self.start, self.end = (tokenizer.token_to_id(s) for s in SPECIAL[:3])
        self._newline = self.text("\n")

    def text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def chat(self, user: str, assistant: str) -> list[int]:
        turns = [self.start, *self.text("user\n" + user), self.end, *self._newline]
        return [*turns, self.start, *self.text("assistant\n" + assistant), self.end, *self._newline]

    def stream(self, texts: list[str], rng: random.Random) -> np.ndarray:
        """Shuffle whole files and chat samples into one u16 token stream, each document ended by <|endoftext|>."""
        documents = []
        for text in texts:
            documents.append([*self.text(text), self.end_of_text])
            documents += [[*self.chat(*pair), self.end_of_text] for pair in chat_samples(text, rng)]
        rng.shuffle(documents)
        return np.concatenate([np.array(d, dtype=np.uint16) for d in documents])


def main(out: pathlib.Path) -> None:
    rng = random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    files = source_files()
    rng.shuffle(files)
    held_out, train = files[:NUM_HELD_OUT_FILES], files[NUM_HELD_OUT_FILES:]
    tokenizer = train_tokenizer([text for _, text in train])
    tokenizer.save(str(out / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    for name, part in (("train", train), ("val", held_out)):
        tokens = encoder.stream([text for _, text in part], rng)
        tokens.tofile(out / f"{name}.bin")
        print(f"{name}: {len(part)} files, {len(tokens)} tokens")
    (out / "held_out.json").write_text(json.dumps([path for path, _ in held_out], indent=1))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
