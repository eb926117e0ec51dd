"""Makes the grammar library's vocabulary, the bytes of every token, from any of our tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.text.tokenizer import Tokenizer, load_tokenizer, output_encoder

# One of them is written before a text, so that no rule for the beginning of a text applies to it.
_GUARDS = ("\n", "x")


class VocabularyError(ConfigError):
    """The model's vocabulary cannot be used for structured output; the message says why."""


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Return the vocabulary of a model, which may have more ids than the tokenizer, or fewer; raises VocabularyError.

    A token that text does not show, or that ends a request, has no bytes: only a grammar that names it allows it.
    """
    ends = [i for i in dict.fromkeys((*eos_token_ids, *tokenizer.eos_token_ids)) if i < vocab_size]
    if not ends:
        raise VocabularyError("structured output: expected a model with an end-of-text token, got one without")
    tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
    known = [token for token in tokens if token is not None]
    if len(known) < len(tokens):
        raise VocabularyError(
            "structured output: expected a tokenizer whose tokens each stand for the same bytes everywhere, got one"
            " whose tokens depend on their neighbours"
        )
    hidden = sorted({i for i in tokenizer.hidden_ids if i < vocab_size} | set(ends))
    table = _Tokens(tokenizer, known, hidden, ends[0])
    table.vocabulary = LLTokenizer(TokenizerWrapper(table), n_vocab=vocab_size, eos_token=ends)
    return table.vocabulary


def load_vocabulary(directory: Path, backend: str, vocab_size: int, eos_token_ids: Iterable[int]) -> LLTokenizer:
    """Return the vocabulary of a checkpoint; raises VocabularyError, also where no tokenizer loads."""
    try:
        tokenizer = load_tokenizer(directory, backend)
    except FdsdError as error:
        raise VocabularyError(f"structured output: {error.message}") from None
    return make_vocabulary(tokenizer, vocab_size, eos_token_ids)


class _Tokens:
    """What TokenizerWrapper reads; its names are the library's."""

    bos_token_id: int | None = None
    vocabulary: LLTokenizer

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int
    ) -> None:
        self._encode = output_encoder(tokenizer)
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        """Write a text that a grammar forces in tokens, none of which text hides.

        What the tokenizer would join with the text before it is written in the longest tokens that fit.
        """
        if isinstance(text, bytes):
            raise TypeError("expected text")  # the library asks which of the two it may give
        for guard in _GUARDS:
            ids = self._encode(guard + text)
            found = self._end_that_spells(ids, text.encode())
            if found is not None:
                return found
        return self.vocabulary.greedy_tokenize(text)

    def _end_that_spells(self, ids: list[int], wanted: bytes) -> list[int] | None:
        spelled, start = b"", len(ids)
        while start > 0 and len(spelled) < len(wanted):
            start -= 1
            spelled = self.tokens[ids[start]] + spelled
        return ids[start:] if spelled == wanted else None
