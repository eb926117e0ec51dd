"""Prompts of several kinds for the speculation benchmarks, made of Python source that the demo model has not seen.

    code-edit   a chat that asks for a function again, renamed or as it is: the answer is mostly in the prompt
    completion  the first half of a source file, to be continued
    free-text   a chat with an open question: nothing to copy from
    repeated    the prompts of code-edit, asked a second time
    random      the tokens of the files in random order: nothing to copy from, and nothing to go on with

The source files are the standard library's that were held out from the demo model's training (Python 3.11's; another
version has most of them).
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.text.chat_template import Message
from fastdeploy_sd.text.prompt import PromptEncoder
from fastdeploy_sd.types import I32

WORKLOADS = ("code-edit", "completion", "free-text", "repeated", "random")
REPEATED = "repeated"
MAX_PROMPT_LEN = 320
_MIN_PROMPT_LEN = 60
_NUM_RANDOM = 1024
_HELD_OUT = (
    "aifc.py", "email/_policybase.py", "email/encoders.py", "genericpath.py", "idlelib/autocomplete.py",
    "idlelib/editor.py", "idlelib/filelist.py", "idlelib/search.py", "importlib/util.py", "json/encoder.py",
    "multiprocessing/context.py", "signal.py", "threading.py",
)  # fmt: skip
_NEW_NAMES = ("value", "item", "result", "node", "name", "index", "line")
_SUBJECTS = (
    "a stack of integers", "a queue with a size limit", "a cache that forgets the oldest entry", "a matrix",
    "a date without a time", "a bank account", "a text file with line numbers", "a binary tree", "a priority queue",
    "a directed graph", "a timer", "a polynomial", "a deck of cards", "an undo history", "a histogram",
    "a rate limiter",
)  # fmt: skip
_QUESTIONS = (
    "Write a class for {}, with a method that prints it.",
    "Explain how you would test {}.",
    "What can go wrong in {}? Show it in Python.",
)


def make_prompts(workload: str, count: int, encoder: PromptEncoder, seed: int = 0) -> list[I32]:
    """Return `count` different prompts of 60 to 320 tokens, free-text ones shorter; repeatable.

    Args:
        workload: one of WORKLOADS.

    Raises:
        ConfigError: the standard library's sources are missing, or give too few prompts of that length.
    """
    rng = random.Random(seed)
    prompts = []
    for token_ids in _MAKERS[workload](encoder, rng):
        prompts.append(np.array(token_ids, np.int32))
        if len(prompts) == count:
            return prompts
    raise ConfigError(f"batch_sizes: expected at most {len(prompts)}, the prompts of {workload}, got {count}")


def code_edits(encoder: PromptEncoder, rng: random.Random) -> Iterator[tuple[list[int], str]]:
    """Yield the prompts of code-edit, each with the code that it asks to be edited."""
    functions = [source for text in _sources() for source in _functions(text)]
    rng.shuffle(functions)
    for i, source in enumerate(functions):
        names = sorted(set(re.findall(r"\b[a-z_]{4,12}\b", source)))
        request = f"Repeat this code:\n{source}"
        if i % 2 and names:
            request = f"Rename `{rng.choice(names)}` to `{rng.choice(_NEW_NAMES)}`:\n{source}"
        token_ids = encoder.encode_chat([Message("user", request)], {})
        if _MIN_PROMPT_LEN <= len(token_ids) <= MAX_PROMPT_LEN:
            yield token_ids, source


def _code_edits(encoder: PromptEncoder, rng: random.Random) -> Iterator[list[int]]:
    return (token_ids for token_ids, _ in code_edits(encoder, rng))


def _completions(encoder: PromptEncoder, rng: random.Random) -> Iterator[list[int]]:
    """Each file gives several prompts: what comes before one of a few places in it."""
    halves = [text[: len(text) * part // 6] for part in (3, 2, 4, 1, 5) for text in _sources()]
    for half in halves:
        token_ids = encoder.encode_text(half)
        if len(token_ids) >= MAX_PROMPT_LEN:
            yield token_ids[-rng.randint(MAX_PROMPT_LEN // 2, MAX_PROMPT_LEN) :]


def _free_texts(encoder: PromptEncoder, rng: random.Random) -> Iterator[list[int]]:
    questions = [question.format(subject) for question in _QUESTIONS for subject in _SUBJECTS]
    rng.shuffle(questions)
    for question in questions:
        yield encoder.encode_chat([Message("user", question)], {})


def _random_ids(encoder: PromptEncoder, rng: random.Random) -> Iterator[list[int]]:
    known = sorted({token_id for text in _sources() for token_id in encoder.encode_text(text)})
    for _ in range(_NUM_RANDOM):
        yield rng.choices(known, k=rng.randint(_MIN_PROMPT_LEN, MAX_PROMPT_LEN))


_MAKERS: Mapping[str, Callable[[PromptEncoder, random.Random], Iterator[Sequence[int]]]] = {
    "code-edit": _code_edits,
    "completion": _completions,
    "free-text": _free_texts,
    REPEATED: _code_edits,
    "random": _random_ids,
}


@cache
def _sources() -> tuple[str, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [root / name for name in _HELD_OUT]
    texts = tuple(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    if not texts:
        raise ConfigError(f"workloads: expected the standard library's sources in {root}, found none")
    return texts


def _functions(text: str) -> Iterator[str]:
    """Yield the dedented source of every function."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
