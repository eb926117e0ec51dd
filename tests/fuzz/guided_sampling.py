"""Outputs of a grammar under random logits, over a real token table.

Nothing of a model is needed: whatever its logits are, the mask decides what may follow, so random logits reach what a
model never would. A liking for what closes texts, lists and objects grows with the length, so that most outputs end.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

import fastdeploy_sd
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.text.guidance.checker import GrammarChecker
from fastdeploy_sd.text.guidance.grammar import json_grammar
from fastdeploy_sd.text.guidance.limits import limits_of
from fastdeploy_sd.text.guidance.vocabulary import make_vocabulary
from fastdeploy_sd.text.tokenizer import load_tokenizer

DEMO_MODEL = Path(fastdeploy_sd.__file__).parent / "demo_model"
# How much a token that begins so is liked: what closes most, what opens or does not lead on least.
_LIKING = {'"': 6.0, "}": 5.0, "]": 5.0, ",": 2.0, ":": 2.0, "{": -2.0, "[": -2.0, " ": -3.0, "\n": -3.0, "\t": -3.0}
_EOS_LIKING = 8.0
_MAX_TEMPERATURE = 3.0


@dataclass(frozen=True)
class Output:
    """What was sampled.

    Attributes:
        data: its bytes.
        is_whole: it ended; else it was cut off at the limit.
        fault: why the grammar stood still before, "" = it did not.
    """

    data: bytes
    is_whole: bool
    fault: str = ""


class GuidedSampler:
    """Samples under grammars over the token table of the demo model."""

    def __init__(self, vocabulary: LLTokenizer, eos_id: int, table: list[bytes]) -> None:
        self.vocabulary = vocabulary
        self._checker = GrammarChecker(vocabulary)
        self._eos_id = eos_id
        self._table = table
        self._liking = np.array([_LIKING.get(chr(data[0]), 0.0) if data else 0.0 for data in table])
        self._liking[eos_id] = _EOS_LIKING

    @classmethod
    def of_demo_model(cls) -> GuidedSampler:
        """Make one over the demo model's tokens."""
        tokenizer = load_tokenizer(DEMO_MODEL)
        size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
        table = [tokenizer.token_bytes(i) or b"" for i in range(size)]
        return cls(make_vocabulary(tokenizer, size, ()), tokenizer.eos_token_ids[0], table)

    def matcher(self, schema: Any) -> LLMatcher:
        """Return a matcher of the grammar that a server would make of a client's schema.

        Raises:
            BadRequest: the schema is refused.
        """
        if not isinstance(schema, dict):
            raise BadRequest("schema: expected a JSON schema (an object)")  # the reader of the field says so
        grammar = json_grammar(schema, "schema")
        self._checker.verify(grammar, "schema")
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=limits_of(grammar))
        assert not matcher.is_error()
        return matcher

    def sample(self, matcher: LLMatcher, rng: random.Random, *, budget: int = 60, limit: int = 400) -> Output:
        """Return one output.

        Args:
            matcher: in its first state; is advanced.
            rng: decides.
            budget: after so many tokens only what is liked best is taken.
            limit: of tokens, at which an output is cut off.
        """
        numbers = np.random.default_rng(rng.getrandbits(32))
        temperature = rng.uniform(0.0, _MAX_TEMPERATURE)
        logits = numbers.standard_normal(len(self._table))
        output: list[bytes] = []
        for step in range(limit):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            ids = np.flatnonzero(allowed[: len(self._table)])
            if matcher.is_error() or not ids.size:
                return Output(b"".join(output), False, matcher.get_error() or "no token is allowed")
            liking = self._liking[ids] * (1 + 100 * (step >= budget))
            noise = logits[ids] + temperature * numbers.gumbel(size=ids.size)
            token_id = int(ids[np.argmax(liking + noise)])
            if not matcher.consume_token(token_id):
                return Output(
                    b"".join(output), False, f"token {token_id}, which the mask allows: {matcher.get_error()}"
                )
            if token_id == self._eos_id:
                return Output(b"".join(output), True)
            output.append(self._table[token_id])
        return Output(b"".join(output), False)
