"""Requests with a grammar, and whether an answer is what its grammar says. For the demo model."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import numpy as np

from fastdeploy_sd.cli.verify.answers import Answer
from fastdeploy_sd.cli.verify.requests import SAMPLINGS
from fastdeploy_sd.config import ModelConfig
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.text.guidance.reasoning import ThinkingGrammar
from fastdeploy_sd.text.reasoning_formats import ReasoningFormat, Start
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer
from fastdeploy_sd.types import Request

PERSON = {
    "type": "object",
    "properties": {
        "full_name_of_person": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["full_name_of_person", "age_in_years", "favourite_colours"],
    "additionalProperties": False,
}
_FLAG_NAMES = [f"is_option_number_{i}_enabled" for i in range(3)]
FLAGS = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in _FLAG_NAMES},
    "required": _FLAG_NAMES,
    "additionalProperties": False,
}
CHOICE = re.compile("(positive|negative|neither of them)")
DATE = re.compile(r"on [0-9]{4}-[0-9]{2}-[0-9]{2}( at [0-9]{2}:[0-9]{2})?")


@dataclass(frozen=True, slots=True)
class Kind:
    """A grammar, and what it means."""

    grammar: str
    verify: Callable[[str], object]


def _schema(schema: Mapping[str, Any]) -> Kind:
    options = {"whitespace_flexible": False}
    grammar = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
    return Kind(grammar, lambda text: jsonschema.validate(json.loads(text), schema))


def _regex(pattern: re.Pattern[str]) -> Kind:
    return Kind(f"start: /{pattern.pattern}/", lambda text: _match(pattern, text))


def _match(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.fullmatch(text), text


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelConfig(model="demo").path)


def _by_ids(first: int, last: int) -> Kind:
    """Ordinary tokens that the grammar names by their ids."""
    begin, end = (re.escape(tokenizer().decode([i], skip_hidden=True)) for i in (first, last))
    pattern = re.compile(f"{begin}[a-z]{{1,5}}{end}done")
    return Kind(f'start: <[{first}]> /[a-z]{{1,5}}/ <[{last}]> "done"', lambda text: _match(pattern, text))


def _thinking(pattern: re.Pattern[str], max_tokens: int) -> Kind:
    """What a model says that thinks for at most so many tokens first; its marks are two that it has no use for."""
    form = ReasoningFormat("test", "<|endoftext|>", "<pad>")
    thinking = ThinkingGrammar(form, tokenizer(), tokenizer().eos_token_ids)
    grammar = thinking.wrap(f"start: /{pattern.pattern}/", Start.INSIDE, max_tokens)
    return Kind(grammar, lambda text: _match(re.compile(f"(?s:.*){pattern.pattern}"), text))


KINDS = (_schema(PERSON), _schema(FLAGS), _regex(CHOICE), _regex(DATE), _by_ids(500, 501), _thinking(DATE, 12))
# What ends a request earlier than its grammar is another story; so is a bias that fights it.
_SAMPLINGS = [SAMPLINGS[name] for name in SAMPLINGS if name not in {"min-tokens", "ends-early"}]


def guided_requests(count: int, eos_token_ids: Sequence[int]) -> list[Request]:
    """Every grammar with every sampling; prompts of different lengths, half of which repeat what the answer may say.

    Every third request has none: guided ones are mixed with others.
    """
    rng = np.random.default_rng(11)
    requests = []
    for i in range(count):
        text = json.dumps(dict.fromkeys(_FLAG_NAMES, True)) if i % 2 else "A letter to a friend: "
        prompt = [
            *tokenizer().encode(text * (1 + i % 3), add_special_tokens=True),
            *rng.integers(4, 4000, rng.integers(1, 60)).tolist(),
        ]
        request = Request(
            f"g{i}",
            np.array(prompt, np.int32),
            SamplingParams(**_SAMPLINGS[i % len(_SAMPLINGS)]),
            max_tokens=90,
            seed=1000 + i,
            eos_token_ids=tuple(eos_token_ids),
            grammar="" if i % 3 == 2 else KINDS[(i - i // 3) % len(KINDS)].grammar,
        )
        requests.append(replace(request, max_tokens=12) if i % 3 == 2 else request)
    return requests


def verify_answer(request: Request, answer: Answer) -> None:
    """Raise where a finished answer is not what the request's grammar says."""
    if request.grammar:
        text = tokenizer().decode([i for i in answer.token_ids if i not in request.eos_token_ids], skip_hidden=True)
        next(kind for kind in KINDS if kind.grammar == request.grammar).verify(text)
